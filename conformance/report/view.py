"""What every rendering shows of a result set: the rows of the run, their records and conclusions, and the details read safely.

A record's `detail` is free-form JSON of unknown origin: what has another shape than expected is left out here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from conformance.matrix import ROLES, Role, Row
from conformance.operators import Family
from conformance.report.text import one_line
from conformance.report.words import Words
from conformance.results import CHECKS, OUTCOMES, PRECISIONS, Check, CheckRecord, Header, OperatorRecord, Outcome, ResultSet
from conformance.verdict import Conclusion, conclude


class View:
    """A result set seen through the matrix: the rows that the run selected, in the matrix's order."""

    def __init__(self, results: ResultSet, rows: Sequence[Row]) -> None:
        self.results = results
        self.rows = tuple(row for row in rows if row.id in results.header.rows)
        self._cells: dict[tuple[str, Role, str, Check], list[CheckRecord]] = {}
        for record in sorted(results.checks, key=lambda r: PRECISIONS.index(r.precision) if r.precision else -1):
            self._cells.setdefault((record.row, record.role, record.variant, record.check), []).append(record)
        self._conclusions = {(row.id, role): self._conclude(row, role) for row in self.rows for role in ROLES}

    def _conclude(self, row: Row, role: Role) -> Conclusion:
        mine = [r for variant in row.variant_names for check in CHECKS for r in self.records(row, role, variant, check)]
        return conclude(row, mine, self.results.header.precisions)

    def conclusion(self, row: Row, role: Role) -> Conclusion:
        """The row's verdict under the role; KeyError for a row that the run did not select."""
        return self._conclusions[(row.id, role)]

    def records(self, row: Row, role: Role, variant: str, check: Check) -> list[CheckRecord]:
        """The records of one cell, in the order of precisions."""
        return self._cells.get((row.id, role, variant, check), [])

    def operators(self, row: Row) -> list[tuple[Family, OperatorRecord | None]]:
        """The families that the row rests on, each with what it came to; None where it was not run."""
        found = {record.family: record for record in self.results.operators}
        return [(family, found.get(family)) for family in row.operators]


def stack_name(header: Header) -> str:
    """A stack in short, in any language: `verl 0.9.1, MindSpeed core_r0.16.0`; without MindSpeed, what runs in its place."""
    versions = {name: one_line(version, 60) for name, version in header.versions().items()}
    core = f"plain megatron-core {versions.get('megatron-core')}"
    return f"verl {versions.get('verl')}, " + (
        f"MindSpeed {versions.get('mindspeed')}" if header.backend == "mindspeed" else core
    )


def run_sentence(header: Header, words: Words) -> str:
    """When the run started, on what stack, by which way through verl, and how."""
    return words.started.format(
        started=one_line(header.started, 60),
        stack=stack_name(header),
        route=header.route,
        device=words.devices[header.device],
        backend=header.backend,
        precisions=", ".join(header.precisions),
    )


@dataclass(frozen=True)
class Form:
    """One way to write the overrides: what works, else what it comes to. `outcome` is None for an unknown word."""

    name: str
    outcome: Outcome | None
    word: str
    overrides: tuple[str, ...]
    summary: str

    @property
    def works(self) -> bool:
        """Whether its overrides are ready to copy."""
        return self.outcome == "pass" and bool(self.overrides)


@dataclass(frozen=True)
class Detail:
    """The parts of a record's detail that have the expected shape, as text."""

    forms: tuple[Form, ...]
    figures: tuple[tuple[str, str], ...]
    evidence: tuple[str, ...]
    how_to_run: str
    #: What the same check came to with the plain backend, when it failed with MindSpeed.
    with_plain: str


def detail_of(record: CheckRecord) -> Detail:
    """Read a record's detail; nothing in it raises."""
    detail = record.detail
    forms, figures, evidence = (detail.get(key) for key in ("forms", "figures", "evidence"))
    how, plain = detail.get("how_to_run"), detail.get("with_plain")
    return Detail(
        forms=tuple(_form(f) for f in forms if isinstance(f, dict)) if isinstance(forms, list) else (),
        figures=tuple((k, _figure(v)) for k, v in figures.items()) if isinstance(figures, dict) else (),
        evidence=tuple(str(line) for line in evidence) if isinstance(evidence, list) else (),
        how_to_run=how if isinstance(how, str) else "",
        with_plain=plain if isinstance(plain, str) else "",
    )


def _form(form: Mapping[str, JsonValue]) -> Form:
    outcome, overrides = form.get("outcome"), form.get("overrides")
    return Form(
        name=str(form.get("form")),
        outcome=next((known for known in OUTCOMES if known == outcome), None),
        word=str(outcome),
        overrides=tuple(str(o) for o in overrides) if isinstance(overrides, list) else (),
        summary=str(form.get("summary", "")),
    )


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
