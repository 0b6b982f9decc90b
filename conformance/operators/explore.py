"""One family, explored: the named cases, then what hypothesis draws; the worst error ratio, or the smallest case that fails."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.database import DirectoryBasedExampleDatabase

from conformance.operators import Family
from conformance.operators.catalogue import CATALOGUE
from conformance.operators.profiles import Explored, Profile
from conformance.operators.tolerance import Lost, Worst, Wrong


@dataclass
class _Seen:
    cases: int = 0
    worst: Worst = field(default_factory=lambda: Worst(0.0, "nothing"))
    name: str = ""
    failed: tuple[str, Any, Exception] | None = None


#: Judges one case: the worst of its quantities, or an exception.
Check = Callable[[Any], Worst]


def explore(family: Family, profile: Profile, check: Check, home: str, *, kernels: bool = True) -> Explored:
    """Check the named cases and as many drawn ones as the profile says, times the family's share.

    `home` is the directory of hypothesis's own files, among them the database of failing cases where the profile has one.
    Without `kernels` there are no cases of MindSpeed's compiled kernels.
    """
    entry = CATALOGUE[family]
    seen = _Seen()

    def one(name: str, case: Any) -> None:
        if seen.failed is not None and isinstance(seen.failed[2], Lost):  # nothing runs any more: the case is as small as it gets
            if case == seen.failed[1]:
                raise seen.failed[2]
            return
        seen.cases += 1
        try:
            worst = check(case)
        except Exception as fault:
            seen.failed = (name, case, fault)
            raise
        if worst.ratio > seen.worst.ratio:
            seen.worst, seen.name = worst, name

    try:
        for name, case in entry.named.items():
            if kernels or not _of_a_kernel(case):
                one(f"named case {name}", case)
        _drawn(family, profile, one, home, kernels=kernels)
    except Exception:
        if seen.failed is None:  # hypothesis itself, or a strategy: our own fault
            raise
        return _falsified(family, seen)
    return Explored(seen.cases, seen.worst.ratio, f"{seen.worst.name} of {seen.name}")


def _of_a_kernel(case: Any) -> bool:
    return getattr(case, "entry", None) == "kernel"


@contextlib.contextmanager
def _nothing_from_loaded_modules() -> Iterator[None]:
    """hypothesis mixes the constants of all loaded modules that are not installed ones into what it draws. Without them the
    cases depend on its version and the seed alone. It has no setting for it; a test compares processes."""
    providers: Any = importlib.import_module("hypothesis.internal.conjecture.providers")
    kept = providers._get_local_constants
    providers._get_local_constants = providers.Constants  # called, it gives none
    providers.CONSTANTS_CACHE.cache.clear()
    try:
        yield
    finally:
        providers._get_local_constants = kept
        providers.CONSTANTS_CACHE.cache.clear()


def _drawn(family: Family, profile: Profile, one: Callable[[str, Any], None], home: str, *, kernels: bool) -> None:
    set_hypothesis_home_dir(home)
    database = DirectoryBasedExampleDatabase(f"{home}/examples") if profile.database else None
    phases = (Phase.reuse, Phase.generate, Phase.shrink) if profile.database else (Phase.generate, Phase.shrink)

    def test(case: Any) -> None:
        one("drawn case", case)

    # derandomize would take its seed from this one function: each family needs numbers of its own.
    if profile.derandomize:
        test = seed(int.from_bytes(hashlib.sha256(family.encode()).digest()[:4], "big"))(test)
    test.__name__ = test.__qualname__ = family  # the database tells tests apart by their names
    configured = settings(
        max_examples=max(1, round(profile.max_examples * CATALOGUE[family].share)),
        derandomize=False,  # said, since hypothesis derandomizes by itself where the variable CI is set
        database=database,
        deadline=None,
        phases=phases,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    strategy = CATALOGUE[family].strategy
    if not kernels:
        strategy = strategy.filter(lambda case: not _of_a_kernel(case))
    with _nothing_from_loaded_modules():
        configured(given(strategy)(test))()


def _falsified(family: Family, seen: _Seen) -> Explored:
    assert seen.failed is not None
    name, case, fault = seen.failed
    first = (str(fault).strip().splitlines() or [""])[0]
    kind = "" if isinstance(fault, Wrong) else f"{type(fault).__name__}: "
    return Explored(seen.cases, seen.worst.ratio, f"{name}: {kind}{first}", pasteable(family, case))


def pasteable(family: Family, case: Any) -> str:
    """A test that runs this one case, as text."""
    kind = type(case)
    return (
        f"from {kind.__module__} import {kind.__name__}\n"
        "from conformance.operators.job import replay\n\n\n"
        f"def test_{family}_falsified() -> None:\n"
        f"    replay({family!r}, {case!r})\n"
    )
