"""Small result sets of the real dataclasses, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.matrix import ROLES, Role, Row, load_matrix
from conformance.results import (
    CHECKS,
    PRECISIONS,
    CheckRecord,
    Footer,
    Header,
    OperatorRecord,
    Package,
    ResultSet,
    ResultsWriter,
    UpstreamException,
)

MATRIX = load_matrix()
STACK = (Package("verl", "0.9.1"), Package("megatron-core", "0.16.1"), Package("torch", "2.13.0+cpu"))
HEADER = Header(
    started="2026-09-01T00:00:00Z",
    device="emulated",
    backend="mindspeed",
    precisions=PRECISIONS,
    stack=STACK,
    matrix_sha256="0" * 64,
    rows=("tp", "swap-optimizer"),
    complete_selection=True,
)
#: Escapes of terminals, C1, bidirectional controls, markup, newlines.
HOSTILE = "a\x1b[31m\x9b2J\u202e\u2066\x00\r\n|`<script>[bold]x[/bold]"


def checks_of(row: Row, **fields: Any) -> list[CheckRecord]:
    """A record of each check of each spelling under each role; `fields` go into all."""
    return [
        replace(CheckRecord(row.id, role, variant, check, precision, "pass", "as it should"), **fields)
        for variant in row.variant_names
        for role in ROLES
        for check in CHECKS
        for precision in (PRECISIONS if check == "parity" else (None,))
    ]


def result_set(checks: Iterable[CheckRecord] | None = None, **header: Any) -> ResultSet:
    """A whole set; by default every check of the header's rows passed."""
    head = replace(HEADER, **header)
    known = {row.id: row for row in MATRIX.rows}
    found = tuple(checks) if checks is not None else tuple(r for i in head.rows for r in checks_of(known[i]))
    return ResultSet(head, found, Footer(checks=len(found), wall_s=1.0, finished="2026-09-01T00:10:00Z"))


def with_check(
    results: ResultSet, row: str, role: Role, check: str, precision: str | None = None, variant: str = "documented", **fields: Any
) -> ResultSet:
    """The set with these fields of one check replaced; KeyError if there is none."""
    name = (row, role, variant, check, precision)
    if name not in {r.name for r in results.checks}:
        raise KeyError(name)
    return replace(results, checks=tuple(replace(r, **fields) if r.name == name else r for r in results.checks))


def raised(kind: str = "TypeError", message: str = "unexpected keyword", frame: str = "a.py:1 f") -> UpstreamException:
    return UpstreamException(kind, message, frame, "MindSpeed")


def measured(difference: Any, bound: Any = 4.0, quantity: str = "log_probs") -> dict[str, Any]:
    return {"measured": {quantity: {"difference": difference, "bound": bound, "where": "sequence 0"}}}


def with_operator(results: ResultSet, outcome: Any, summary: str = "as it should") -> ResultSet:
    """The set with a record of one family of operators."""
    operator = OperatorRecord("rms_norm", outcome, summary, 10, None, results.header.device)
    footer = replace(results.footer, operators=1) if results.footer else None
    return replace(results, operators=(operator,), footer=footer)


def write(results: ResultSet, directory: Path) -> Path:
    """The set as a run writes it."""
    with ResultsWriter(directory, results.header) as writer:
        for record in (*results.checks, *results.operators):
            writer.add(record)
        if results.footer:
            writer.finish(results.footer.finished, results.footer.wall_s)
    return directory
