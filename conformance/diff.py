"""What changes between two result sets: per check, per figure, per row's verdict, and which packages moved. Pure functions.

The rule for outcomes, from best to worst by what a user of the key gets: `pass`; `always_on` (it runs, the key is of no
use); `no_effect` (it does not run, all else does); `refused` (told clearly); `crash`; `fail` (goes on with wrong numbers or
with something else, untold). `unsupported`, `not_run` and `error` are no answer.

- regressed: down that ladder, or a pass that has no answer now.
- fixed: a pass now, and none before.
- changed outcome: everything else. A refusal in place of a crash is better, but nobody would call it fixed.

A figure moved when its difference from the baseline changed by more than a quarter of its bound. A bound is four standard
deviations of rounding, or four times the baseline's own error (`conformance/parity.py`), so that is one rounding's worth;
two runs of one stack on one machine differ by nothing. Figures are compared by their names: those of one side only are
counted, and a check that passes without any of its old figures is named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from packaging.utils import canonicalize_name
from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError

from conformance.errors import UsageFault
from conformance.matrix import ROLES, Role, Row
from conformance.operators import Family
from conformance.results import (
    Backend,
    Check,
    CheckRecord,
    Device,
    OperatorRecord,
    Outcome,
    Package,
    Precision,
    ResultSet,
    Route,
    read_results,
)
from conformance.verdict import Verdict, conclude

Change = Literal["regressed", "fixed", "changed_outcome", "changed_reason", "new", "gone"]
Direction = Literal["regressed", "fixed", "changed_outcome"]
#: A number, or what results write for one that JSON lacks.
Measure = Annotated[float, Strict()] | Literal["nan", "inf", "-inf"]
Name = tuple[str, str, str, str, str | None]

LADDER: tuple[Outcome, ...] = ("pass", "always_on", "no_effect", "refused", "crash", "fail")
#: Verdict -> its step on that ladder. `not run` and `error` are no answer.
_VERDICT_STEPS = {
    **{verdict: 0 for verdict in Verdict if verdict.green},
    Verdict.ALWAYS_ON: 1,
    Verdict.NO_EFFECT: 2,
    Verdict.REFUSED: 3,
    Verdict.BROKEN: 4,
    Verdict.WRONG_NUMBERS: 5,
}
#: The part of a bound that is noise.
NOISE = 0.25
#: An object's address in a message is another one in each run.
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


@dataclass(frozen=True)
class Measured:
    """One figure as a record's detail has it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    difference: Measure
    bound: Measure
    where: str


@dataclass(frozen=True)
class Run:
    """Which run a side is. `started` is ISO 8601."""

    started: str
    device: Device
    backend: Backend
    route: Route
    matrix_sha256: str


@dataclass(frozen=True)
class PackageMove:
    """A package that is not the same on both sides; None where there is none."""

    name: str
    old: Package | None
    new: Package | None


@dataclass(frozen=True)
class VerdictChange:
    """A row's verdict under one role, in the report's words."""

    row: str
    role: Role
    change: Direction
    old: str
    new: str


@dataclass(frozen=True)
class CheckChange:
    """One check that is not the same on both sides; what is None is on the other side only."""

    row: str
    role: Role
    variant: str
    check: Check
    precision: Precision | None
    change: Change
    old: Outcome | None
    new: Outcome | None
    old_reason: str | None
    new_reason: str | None


@dataclass(frozen=True)
class FigureMove:
    """One figure of a parity check, of both sides, that moved by more than noise."""

    row: str
    role: Role
    variant: str
    precision: Precision | None
    quantity: str
    old: Measured
    new: Measured


@dataclass(frozen=True)
class FiguresGone:
    """A parity check that passes on both sides, and of whose old figures the new side has none."""

    row: str
    role: Role
    variant: str
    precision: Precision | None
    quantities: tuple[str, ...]


@dataclass(frozen=True)
class OperatorChange:
    """A family of operators whose outcome is not the same; what is None is on the other side only.

    Its reasons are not compared: the inputs are generated, and another failing one is no news.
    """

    family: Family
    change: Change
    old: Outcome | None
    new: Outcome | None
    old_reason: str | None
    new_reason: str | None


@dataclass(frozen=True)
class Diff:
    """All that changed. `notes` say what makes the two sides hard to compare; `compared` counts the checks of both."""

    old: Run
    new: Run
    notes: tuple[str, ...]
    packages: tuple[PackageMove, ...]
    verdicts: tuple[VerdictChange, ...]
    checks: tuple[CheckChange, ...]
    figures: tuple[FigureMove, ...]
    figures_gone: tuple[FiguresGone, ...]
    operators: tuple[OperatorChange, ...]
    compared: int
    schema_version: Literal[1] = 1
    kind: Literal["diff"] = "diff"

    def of(self, *changes: Change) -> tuple[CheckChange, ...]:
        """The checks with one of these changes, in the order of the matrix."""
        return tuple(c for c in self.checks if c.change in changes)


def direction(old: Outcome, new: Outcome) -> Direction | None:
    """The module's rule; None for the same outcome."""
    return None if old == new else _moved_to(_step(old), _step(new))


def verdict_direction(old: Verdict, new: Verdict) -> Direction | None:
    """The same rule for verdicts, of which several say that it works; None for the same verdict."""
    return None if old is new else _moved_to(_VERDICT_STEPS.get(old), _VERDICT_STEPS.get(new))


def _step(outcome: Outcome) -> int | None:
    return LADDER.index(outcome) if outcome in LADDER else None


def _moved_to(old: int | None, new: int | None) -> Direction:
    """From step to step of the ladder: 0 works, None is no answer."""
    if old == 0 or (old is not None and new is not None and new > old):
        return "changed_outcome" if new == 0 else "regressed"
    return "fixed" if new == 0 else "changed_outcome"


def read_whole(path: Path) -> ResultSet:
    """A result set of a run that had every row and came to its end; UsageFault for any other."""
    results = read_results(path)
    if not results.complete:
        raise UsageFault(f"{path}: the run was interrupted (no footer); right form: a run that came to its end")
    if not results.header.complete_selection:
        raise UsageFault(f"{path}: a run of some rows or checks only; right form: a run without --row and -k")
    return results


def compare(old: ResultSet, new: ResultSet, rows: Sequence[Row]) -> Diff:
    """Compare two whole sets (see `read_whole`). `rows` are the matrix's: they give the order and the verdicts."""
    before = {r.name: r for r in old.checks}
    after = {r.name: r for r in new.checks}
    order = {row.id: i for i, row in enumerate(rows)}
    names = sorted({**before, **after}, key=lambda name: order.get(name[0], len(order)))
    both = [name for name in names if name in before and name in after]
    pairs = [(before[name], after[name]) for name in both]
    return Diff(
        old=_run(old),
        new=_run(new),
        notes=(*_notes(old, new, order), *_figure_notes(pairs)),
        packages=tuple(_packages(old.header.stack, new.header.stack)),
        verdicts=tuple(_verdicts(old, new, rows)),
        checks=tuple(c for c in (_check(before.get(name), after.get(name)) for name in names) if c),
        figures=tuple(move for pair in pairs for move in _figures(*pair)),
        figures_gone=tuple(gone for pair in pairs for gone in _figures_gone(*pair)),
        operators=tuple(_operators(old, new)),
        compared=len(both),
    )


def _run(results: ResultSet) -> Run:
    header = results.header
    return Run(header.started, header.device, header.backend, header.route, header.matrix_sha256)


def _notes(old: ResultSet, new: ResultSet, order: Mapping[str, int]) -> Iterator[str]:
    if old.header.matrix_sha256 != new.header.matrix_sha256:
        yield "the matrices differ: the two runs did not test the same thing"
    if old.header.device != new.header.device:
        yield f"the devices differ: {old.header.device} and {new.header.device}"
    if old.header.route != new.header.route:
        yield f"the ways through verl differ: {old.header.route} and {new.header.route}"
    if old.header.backend != new.header.backend:
        yield f"the backends differ: {old.header.backend} and {new.header.backend}"
    before, after = old.header.versions(), new.header.versions()
    for side, names in (("old", before.keys() - after.keys()), ("new", after.keys() - before.keys())):
        if names:
            yield f"packages of the {side} run only: {', '.join(sorted(names))}"
    strange = sorted({r.row for s in (old, new) for r in s.checks} - set(order))
    if strange:
        yield f"not in this matrix.yaml, so without a verdict: {', '.join(strange)}"


def _figure_notes(pairs: Sequence[tuple[CheckRecord, CheckRecord]]) -> Iterator[str]:
    without = sum(_lacks_figures(*pair) for pair in pairs)
    if without:
        yield f"{without} parity checks have figures on one side or neither that a program can read: not compared"
    sides = [(_measured(old), _measured(new)) for old, new in pairs]
    alone = sum(len(old.keys() ^ new.keys()) for old, new in sides if old and new)
    if alone:
        yield f"{alone} figures are on one side only, by their names: not compared"


def _packages(old: Iterable[Package], new: Iterable[Package]) -> Iterator[PackageMove]:
    before, after = ({canonicalize_name(p.name): p for p in side} for side in (old, new))
    for name in {**before, **after}:
        if before.get(name) != after.get(name):
            yield PackageMove(name, before.get(name), after.get(name))


def _verdicts(old: ResultSet, new: ResultSet, rows: Sequence[Row]) -> Iterator[VerdictChange]:
    for row in rows:
        if row.id not in old.header.rows or row.id not in new.header.rows:
            continue
        for role in ROLES:
            before, after = verdict_of(old, row, role), verdict_of(new, row, role)
            change = verdict_direction(before, after)
            if change:
                yield VerdictChange(row.id, role, change, before.value, after.value)


def verdict_of(results: ResultSet, row: Row, role: Role) -> Verdict:
    """The row's verdict under that role in that set."""
    mine = [r for r in results.checks if (r.row, r.role) == (row.id, role)]
    return conclude(row, mine, results.header.precisions).verdict


def _check(old: CheckRecord | None, new: CheckRecord | None) -> CheckChange | None:
    change = _change(old, new)
    if change is None and old and new and reason(old) != reason(new):
        change = "changed_reason"
    record = new or old
    if change is None or record is None:
        return None
    return CheckChange(
        *(record.row, record.role, record.variant, record.check, record.precision, change),
        old.outcome if old else None,
        new.outcome if new else None,
        old.summary if old else None,
        new.summary if new else None,
    )


def _change(old: CheckRecord | OperatorRecord | None, new: CheckRecord | OperatorRecord | None) -> Change | None:
    if old is None or new is None:
        return "gone" if new is None else "new"
    return direction(old.outcome, new.outcome)


def _operators(old: ResultSet, new: ResultSet) -> Iterator[OperatorChange]:
    before, after = ({o.family: o for o in side.operators} for side in (old, new))
    for family in {**before, **after}:
        one, other = before.get(family), after.get(family)
        change = _change(one, other)
        if change is not None:
            outcomes = (one.outcome if one else None, other.outcome if other else None)
            yield OperatorChange(family, change, *outcomes, one.summary if one else None, other.summary if other else None)


def reason(record: CheckRecord) -> tuple[str, ...]:
    """What tells one failure from another of the same outcome. Not the frame: its line moves with any edit of upstream.

    The summary of a parity check that was measured only repeats figures, which are compared as such.
    """
    raised = record.exception
    if raised is None and record.check == "parity" and record.outcome in ("pass", "fail"):
        return ()
    texts = (record.summary, *((raised.type, raised.message, raised.owner) if raised else ()))
    return tuple(_ADDRESS.sub("0x", text) for text in texts)


@cache
def _measured_adapter() -> TypeAdapter[dict[str, Measured]]:
    return TypeAdapter(Annotated[dict[str, Measured], Field(max_length=100)])


def _measured(record: CheckRecord) -> dict[str, Measured]:
    """The figures that a program can read; none for results that were written without, or in another form."""
    try:
        return _measured_adapter().validate_python(record.detail.get("measured", {}))
    except ValidationError:
        return {}


def _lacks_figures(old: CheckRecord, new: CheckRecord) -> bool:
    measured = [r for r in (old, new) if r.check == "parity" and r.outcome in ("pass", "fail")]
    return len(measured) == 2 and not all(_measured(r) for r in measured)


def _figures(old: CheckRecord, new: CheckRecord) -> Iterator[FigureMove]:
    before, after = _measured(old), _measured(new)
    if not before or not after:
        return
    for quantity in {**before, **after}:
        one, other = before.get(quantity), after.get(quantity)
        # A figure of one side alone did not move: another route reports others, or another rule applies.
        if one is not None and other is not None and _moved(one, other):
            yield FigureMove(new.row, new.role, new.variant, new.precision, quantity, one, other)


def _figures_gone(old: CheckRecord, new: CheckRecord) -> Iterator[FiguresGone]:
    before = _measured(old)
    if old.outcome == new.outcome == "pass" and before and not before.keys() & _measured(new).keys():
        yield FiguresGone(old.row, old.role, old.variant, old.precision, tuple(before))


def _moved(old: Measured, new: Measured) -> bool:
    before, after = float(old.difference), float(new.difference)
    if not (math.isfinite(before) and math.isfinite(after)):
        return str(before) != str(after)
    bounds = [bound for bound in (float(old.bound), float(new.bound)) if math.isfinite(bound)]
    return abs(after - before) > NOISE * max(bounds, default=0.0)
