"""From the outcomes of a row's checks to one verdict: pure functions, total over every combination of outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from conformance.matrix import Row, Spelling
from conformance.results import CHECKS, Check, CheckRecord, Outcome, Precision


class Verdict(Enum):
    """What a row comes to. The values are the words of the report."""

    WORKS = "works"
    WITH_COMPANIONS = "works with companions"
    OTHER_SPELLING = "works with another spelling"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"
    ALWAYS_ON = "always on"
    NO_EFFECT = "no effect"
    WRONG_NUMBERS = "wrong numbers"
    REFUSED = "refused"
    BROKEN = "broken"
    ERROR = "error"

    @property
    def green(self) -> bool:
        """Whether it says that some spelling works."""
        return self in (Verdict.WORKS, Verdict.WITH_COMPANIONS, Verdict.OTHER_SPELLING)


#: From harmless to grave: the gravest check decides. `not run` is mildest but for `works`, since a row that was
#: refused or does nothing has checks that could not run. Our own error outranks all: it must not pass as upstream's.
GRAVITY = (
    Verdict.WORKS,
    Verdict.NOT_APPLICABLE,
    Verdict.NOT_RUN,
    Verdict.ALWAYS_ON,
    Verdict.NO_EFFECT,
    Verdict.WRONG_NUMBERS,
    Verdict.REFUSED,
    Verdict.BROKEN,
    Verdict.ERROR,
)

#: Verdicts that say nothing about the switch.
NO_ANSWER = (Verdict.NOT_APPLICABLE, Verdict.NOT_RUN)

_OF_OUTCOME: dict[Outcome, Verdict] = {
    "pass": Verdict.WORKS,
    "always_on": Verdict.ALWAYS_ON,
    "no_effect": Verdict.NO_EFFECT,
    "refused": Verdict.REFUSED,
    "crash": Verdict.BROKEN,
    "unsupported": Verdict.NOT_APPLICABLE,
    "error": Verdict.ERROR,
    "not_run": Verdict.NOT_RUN,
}

#: `fail` says something else in each check: no form is taken; what ran is not what the key promises; numbers differ.
_OF_FAIL: dict[Check, Verdict] = {
    "accepted": Verdict.REFUSED,
    "engaged": Verdict.BROKEN,
    "parity": Verdict.WRONG_NUMBERS,
}


#: Outcomes that are somebody's failure.
FAILURES: tuple[Outcome, ...] = ("fail", "refused", "crash")


@dataclass(frozen=True)
class Conclusion:
    """A row's verdict under one role: the spelling that decided it, what each came to by itself, and whose each failure is."""

    verdict: Verdict
    variant: str
    by_variant: dict[str, Verdict]
    owners: dict[str, str]


def of_check(check: Check, outcome: Outcome) -> Verdict:
    """What one check alone comes to."""
    return _OF_FAIL[check] if outcome == "fail" else _OF_OUTCOME[outcome]


def of_variant(records: Iterable[CheckRecord], precisions: Sequence[Precision]) -> Verdict:
    """What one spelling comes to under one role: its gravest check; a check without a record was not run.

    `precisions`: parity is wanted in each of these; what is not for a precision has no say in it, and where parity is judged in
    one precision, neither has that it cannot be in another.
    """
    records = tuple(r for r in records if r.precision is None or r.precision in precisions)
    judged = any(r.check == "parity" and r.outcome != "unsupported" for r in records)
    found = [of_check(r.check, r.outcome) for r in records if not (judged and (r.check, r.outcome) == ("parity", "unsupported"))]
    have = {(r.check, r.precision) for r in records if r.check == "parity"} | {(r.check, None) for r in records}
    wanted = [(check, None) for check in CHECKS] + [("parity", p) for p in precisions]
    if any(name not in have for name in wanted):
        found.append(Verdict.NOT_RUN)
    return max(found, key=GRAVITY.index)


def conclude(row: Row, records: Iterable[CheckRecord], precisions: Sequence[Precision]) -> Conclusion:
    """A row's verdict under one role, from that role's records.

    The documented spelling decides. Only if it was run and does not work, and a variant does, is the verdict about that
    variant. An error in any spelling makes the row an error.
    """
    records = tuple(records)
    wanted = [p for p in precisions if p in row.precisions]
    by_variant = {name: of_variant((r for r in records if r.variant == name), wanted) for name in row.variant_names}
    owners = {name: owner for name in row.variant_names if (owner := whose(r for r in records if r.variant == name))}
    documented = by_variant["documented"]
    wrong = next((name for name, verdict in by_variant.items() if verdict is Verdict.ERROR), None)
    if wrong is not None:
        return Conclusion(Verdict.ERROR, wrong, by_variant, owners)
    if documented is Verdict.WORKS:
        return Conclusion(_worded(row.documented, row.documented), "documented", by_variant, owners)
    working = next((name for name, verdict in by_variant.items() if verdict is Verdict.WORKS), None)
    if documented is Verdict.NOT_RUN or working is None:
        return Conclusion(documented, "documented", by_variant, owners)
    return Conclusion(_worded(row.spelling(working), row.documented), working, by_variant, owners)


def _worded(spelling: Spelling, documented: Spelling) -> Verdict:
    """How a spelling that works is called, seen from the documented one."""
    if spelling.settings != documented.settings:
        return Verdict.OTHER_SPELLING
    return Verdict.WITH_COMPANIONS if spelling.companions else Verdict.WORKS


def blame(mindspeed: CheckRecord, plain: CheckRecord) -> str | None:
    """Whose failure a check with the `mindspeed` backend is, given the same check with `plain`.

    MindSpeed's if it passes without MindSpeed; if the very same happens there, its owner. None when that does not tell: another
    failure, our own error, or a row that `plain` has not.
    """
    if mindspeed.outcome not in FAILURES:
        return None
    if plain.outcome == "pass":
        return "MindSpeed"
    if plain.outcome != mindspeed.outcome:
        return None
    ours, theirs = mindspeed.exception, plain.exception
    if ours is None and theirs is None:
        return "verl or megatron-core"
    same = ours is not None and theirs is not None and (ours.type, ours.message) == (theirs.type, theirs.message)
    return theirs.owner if theirs is not None and same else None


def whose(records: Iterable[CheckRecord]) -> str | None:
    """Whose failure a spelling's is: what `blame` found for its first failed check, else the owner of what was raised."""
    failed = next((r for r in records if r.outcome in FAILURES), None)
    if failed is None:
        return None
    found = failed.detail.get("whose") or (failed.exception and failed.exception.owner)
    return str(found) if found else None
