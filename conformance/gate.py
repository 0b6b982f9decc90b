"""Whether an upgrade may go ahead: a diff of two result sets, judged by a policy. Pure functions of the two and of a date.

The gate is red when a check or a family of operators regressed, has lost its answer or is gone, when a parity check has lost
its figures, when a row that must work does not, when something ended in an error of this suite, or when a waiver is past its
date. What fails and had no answer before took nothing from anybody: it is noted. A waiver covers what it names until the end
of its day (UTC).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from conformance.diff import LADDER, CheckChange, Diff, OperatorChange, verdict_of
from conformance.errors import UsageFault
from conformance.matrix import ROLES, Id, Matrix, Role, Row, Words
from conformance.operators import Family
from conformance.report.difference import name_of
from conformance.results import Check, Outcome, Precision, ResultSet
from conformance.tomlsource import load_toml
from conformance.verdict import Verdict
from conformance.yamlsource import Document, Items, Strictly, form_error, nearest, validate

Kind = Literal["regressed", "lost", "gone", "figures gone", "must work", "error of this suite", "waiver past its date"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_WORDS = {verdict.value: verdict for verdict in Verdict}


def _check_verdict(word: str) -> str:
    if word not in _WORDS:
        raise form_error(f"{word!r} is no verdict", nearest(word, _WORDS))
    return word


VerdictWord = Annotated[str, AfterValidator(_check_verdict), WithJsonSchema({"enum": list(_WORDS)})]


class MustWork(Strictly):
    """Rows that have to have one of these verdicts under these roles; by default one that says that it works."""

    rows: Items[Id] = Field(min_length=1)
    roles: Items[Role] = Field(ROLES, min_length=1)
    verdicts: Items[VerdictWord] = Field(tuple(v.value for v in Verdict if v.green), min_length=1)


class Waiver(Strictly):
    """What may be red until the end of that day, and why: a row, or a family of operators. What is left out holds for all.

    One with a variant, check, precision or outcome covers single checks; one without also covers that the row must work.
    """

    row: Id | None = None
    operator: Family | None = None
    until: datetime.date
    reason: Words
    roles: Items[Role] = Field(ROLES, min_length=1)
    variant: Id | None = None
    check: Check | None = None
    precision: Precision | None = None
    outcome: Outcome | None = Field(None, description="what the check comes out as")

    @model_validator(mode="after")
    def _is_of_one_thing(self) -> Waiver:
        if (self.row is None) == (self.operator is None):
            raise form_error("a waiver of neither or both", "one of row = and operator =")
        return self

    @property
    def subject(self) -> str:
        """The row's id, or the family of operators."""
        return self.row or str(self.operator)


class Policy(Strictly):
    """The whole file."""

    must_work: Items[MustWork] = ()
    waiver: Items[Waiver] = ()


@dataclass(frozen=True)
class Finding:
    """One thing that makes the gate red, unless it is waived. Only what names a check can be covered by its waivers."""

    kind: Kind
    text: str
    row: str | None = None
    role: Role | None = None
    variant: str | None = None
    check: Check | None = None
    precision: Precision | None = None
    outcome: Outcome | None = None
    operator: Family | None = None
    waived_by: Waiver | None = None


@dataclass(frozen=True)
class Judgement:
    """What the gate found, waived or not, the waivers that waived nothing, and what fails without an answer before."""

    findings: tuple[Finding, ...]
    unused: tuple[Waiver, ...]
    noted: tuple[str, ...]

    @property
    def red(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.waived_by is None)


def load_policy(path: Path, matrix: Matrix) -> Policy:
    """Read and check a policy; UsageFault with file and line, also for a row or variant that does not exist."""
    document = load_toml(path)
    policy = validate(document, Policy)
    for number, entry in enumerate(policy.must_work):
        for row in entry.rows:
            _check_row(document, ("must_work", number, "rows"), row, matrix)
    for number, waiver in enumerate(policy.waiver):
        if waiver.row is None:
            continue
        _check_row(document, ("waiver", number, "row"), waiver.row, matrix)
        names = matrix[waiver.row].variant_names
        if waiver.variant is not None and waiver.variant not in names:
            what = f"no such variant; right form: {nearest(waiver.variant, names)}"
            raise document.fault(("waiver", number, "variant"), what)
    return policy


def _check_row(document: Document, at: tuple[str | int, ...], row: str, matrix: Matrix) -> None:
    if row not in matrix.ids():
        raise document.fault(at, f"{row!r} is no row; right form: {nearest(row, matrix.ids())}")


def judge(diff: Diff, new: ResultSet, rows: Sequence[Row], policy: Policy, today: datetime.date) -> Judgement:
    """Judge the new set, of which `diff` is the difference to the old one.

    UsageFault when the two ran on different devices or backends: then a difference says nothing about an upgrade.
    """
    if (diff.old.device, diff.old.backend) != (diff.new.device, diff.new.backend):
        raise UsageFault(
            f"the old set is of backend {diff.old.backend} on device {diff.old.device}, the new one of {diff.new.backend} "
            f"on {diff.new.device}; right form: two sets of one backend and device (conformance diff compares any two)"
        )
    live = [waiver for waiver in policy.waiver if waiver.until >= today]
    found = [_waived(finding, live) for finding in (*_checks(diff), *_errors(new), *_must_work(new, rows, policy))]
    used = [finding.waived_by for finding in found]
    past = [_past(waiver) for waiver in policy.waiver if waiver.until < today]
    unused = tuple(waiver for waiver in live if not any(waiver is other for other in used))
    changes: tuple[CheckChange | OperatorChange, ...] = (*diff.checks, *diff.operators)
    noted = tuple(_said(change) for change in changes if _is_new_failure(change))
    return Judgement((*found, *past), unused, noted)


def _checks(diff: Diff) -> Iterator[Finding]:
    for c in diff.checks:
        kind = _kind(c)
        if kind is not None:
            yield Finding(kind, _said(c), c.row, c.role, c.variant, c.check, c.precision, c.new)
    for o in diff.operators:
        kind = _kind(o)
        if kind is not None:
            yield Finding(kind, _said(o), operator=o.family, outcome=o.new)
    for g in diff.figures_gone:
        text = f"{name_of(g)}: passes, and has none of its figures any more: {', '.join(g.quantities)}"
        yield Finding("figures gone", text, g.row, g.role, g.variant, "parity", g.precision, "pass")


def _kind(change: CheckChange | OperatorChange) -> Kind | None:
    """Why a change is red; None for one that is not. An error of this suite has a finding of its own."""
    if change.change == "gone":
        return "gone"
    if change.old not in LADDER or change.new == "error":
        return None
    if change.new not in LADDER:
        return "lost"
    return "regressed" if change.change == "regressed" else None


def _is_new_failure(change: CheckChange | OperatorChange) -> bool:
    return change.old not in LADDER and change.new in LADDER and change.new != "pass"


def _said(change: CheckChange | OperatorChange) -> str:
    name = name_of(change) if isinstance(change, CheckChange) else f"operator {change.family}"
    old, new = (side or "not there" for side in (change.old, change.new))
    return f"{name}: {old}, now {new}: {change.new_reason or change.old_reason}"


def _errors(new: ResultSet) -> Iterator[Finding]:
    for r in new.checks:
        if r.outcome == "error":
            where = f"{r.row} {r.role} {r.variant} {r.check}"
            text = f"{where}: {r.summary}"
            yield Finding("error of this suite", text, r.row, r.role, r.variant, r.check, r.precision, r.outcome)
    for o in new.operators:
        if o.outcome == "error":
            text = f"operator {o.family}: {o.summary}"
            yield Finding("error of this suite", text, operator=o.family, outcome=o.outcome)


def _must_work(new: ResultSet, rows: Sequence[Row], policy: Policy) -> Iterator[Finding]:
    by_id = {row.id: row for row in rows}
    for entry in policy.must_work:
        for row in entry.rows:
            for role in entry.roles:
                verdict = verdict_of(new, by_id[row], role).value
                if verdict not in entry.verdicts:
                    text = f"{row} {role}: {verdict}; wanted {' or '.join(entry.verdicts)}"
                    yield Finding("must work", text, row, role=role)


def _past(waiver: Waiver) -> Finding:
    return Finding("waiver past its date", f"{waiver.subject}: waived until {waiver.until}: {waiver.reason}")


def _waived(finding: Finding, live: Sequence[Waiver]) -> Finding:
    by = next((waiver for waiver in live if _covers(waiver, finding)), None)
    return replace(finding, waived_by=by)


def _covers(waiver: Waiver, finding: Finding) -> bool:
    names = ("variant", "check", "precision", "outcome")
    return (
        (waiver.row, waiver.operator) == (finding.row, finding.operator)
        and (finding.role is None or finding.role in waiver.roles)
        and all(getattr(waiver, name) in (None, getattr(finding, name)) for name in names)
    )


def lines(judgement: Judgement) -> list[str]:
    """What the gate says, the red first; the last line is the conclusion."""
    said = [f"RED {f.kind}: {f.text}" for f in judgement.red]
    said += [
        f"waived until {f.waived_by.until} ({f.waived_by.reason}): {f.kind}: {f.text}" for f in judgement.findings if f.waived_by
    ]
    said += [f"note: no pass, and no answer before: {text}" for text in judgement.noted]
    said += [f"note: a waiver that waives nothing, to be removed: {w.subject}: {w.reason}" for w in judgement.unused]
    counts = [f"{n} {kind}" for kind in KINDS if (n := sum(f.kind == kind for f in judgement.red))]
    return [*said, f"gate: red: {', '.join(counts)}" if counts else "gate: green"]
