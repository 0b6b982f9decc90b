"""What goes into a family's job and what comes out, and hypothesis's profiles, which `--hypothesis-profile` chooses from.

Like the package, without torch: the pytest process has no need of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conformance.errors import UsageFault
from conformance.operators import COLLECTIVE, Family


@dataclass(frozen=True)
class Profile:
    """What a run takes of a hypothesis profile. `database`: whether failing cases are kept, in .hypothesis/ (not in git)."""

    max_examples: int
    derandomize: bool
    database: bool = False


#: The same cases in every run, within a minute or so on two cores.
CI = Profile(max_examples=150, derandomize=True)
#: Other cases every night.
NIGHTLY = Profile(max_examples=5000, derandomize=False, database=True)


def register(wanted: str) -> None:
    """Make the names known to hypothesis, before its pytest plugin looks for the wanted one; UsageFault if it knows no such."""
    from hypothesis import settings
    from hypothesis.errors import InvalidArgument

    settings.register_profile("ci", max_examples=CI.max_examples, derandomize=True, database=None, deadline=None)
    settings.register_profile("nightly", max_examples=NIGHTLY.max_examples, derandomize=False, deadline=None)
    try:
        settings.get_profile(wanted)
    except InvalidArgument:
        raise UsageFault(f"--hypothesis-profile {wanted}: no such profile; right form: ci or nightly") from None


def chosen(name: str | None) -> Profile:
    """The profile of that name; `ci` without one. Any profile that hypothesis knows will do."""
    if name is None or name == "ci":
        return CI
    if name == "nightly":
        return NIGHTLY
    from hypothesis import settings

    found = settings.get_profile(name)
    return Profile(found.max_examples, found.derandomize, found.database is not None)


@dataclass(frozen=True)
class OperatorSpec:
    """One family under one profile; with `case`, that case alone. `home`: where hypothesis keeps its files."""

    family: Family
    profile: Profile
    home: str
    case: Any = None

    @property
    def deadline_s(self) -> float:
        """A case takes some hundredths of a second, a long one half a second."""
        return 120.0 + 0.5 * self.profile.max_examples


@dataclass(frozen=True)
class Explored:
    """What came of a family. `falsifying` is the text of a test that fails in the same way, None when all is well."""

    cases: int
    worst_ratio: float
    where: str
    falsifying: str | None = None


def rank_counts(family: Family) -> tuple[int, ...]:
    """The numbers of ranks that a family runs on."""
    return (2, 4) if family in COLLECTIVE else (1,)
