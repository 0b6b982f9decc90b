"""Result sets for the tests of the page: tame ones, and the same with hostile text everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conformance.matrix import ROLES, load_matrix
from conformance.results import CHECKS, CheckRecord, Footer, Header, Package, ResultSet, UpstreamException

MATRIX = load_matrix()
HEADER = Header(
    started="2026-09-01T00:00:00Z",
    device="emulated",
    backend="mindspeed",
    precisions=("float32", "bfloat16"),
    stack=(Package("verl", "0.9.1", "somewhere/verl"), Package("mindspeed", "0.16.0", None, "e4772499")),
    matrix_sha256="0" * 64,
    rows=tuple(MATRIX.ids()),
    complete_selection=True,
)
HOSTILE = (
    "</script></style></title><script>window.planted=1</script><img src=x onerror='window.planted=1'>\"'`"
    '<a href="javascript:window.planted=1">x</a>--><!--{{ 7*7 }}{% raw %}&lt;&#60;\u202eabc\u2066\x1b[31m\x00\u2028\n'
    + "W"
    * 3000
)


def records(row: str, text: str = "seen", variant: str = "documented", **changes: Any) -> list[CheckRecord]:
    """A record of every check of one spelling, with `text` wherever a result holds text."""
    detail: dict[str, Any] = {
        "forms": [
            {"form": text, "outcome": "pass", "overrides": [text, text], "summary": text},
            {"form": text, "outcome": text, "summary": text},
        ],
        "evidence": [text],
        "figures": {text: text, "loss": "1e-7 (bound 1e-6) at global"},
        "how_to_run": text,
    }
    raised = UpstreamException(text, text, text, text)
    return [
        replace(CheckRecord(row, role, variant, check, precision, "pass", text, raised, detail), **changes)
        for role in ROLES
        for check in CHECKS
        for precision in (HEADER.precisions if check == "parity" else (None,))
    ]


def results(*checks: CheckRecord, complete: bool = True, **changes: Any) -> ResultSet:
    """A result set; `changes` are fields of the header."""
    footer = Footer(checks=len(checks), wall_s=1.0, finished="x") if complete else None
    return ResultSet(replace(HEADER, **changes), checks, footer)


def written(text: str, started: str = "2026-09-01T00:00:00Z") -> ResultSet:
    """A run of all rows in which every text is `text`."""
    checks = [r for row in MATRIX.rows for variant in row.variant_names for r in records(row.id, text, variant)]
    return results(*checks, stack=(Package(text, text, text, text),), started=started)
