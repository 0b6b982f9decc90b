"""The generated part of `docs/`: pages that say what the matrix, the published results and the code say, and nothing older."""

from __future__ import annotations

from pathlib import Path

from conformance.errors import UsageFault
from conformance.known import load_known
from conformance.matrix import ROOT, load_matrix
from conformance.npu.vendor import read_facts
from conformance.report.operators_page import operators_page
from conformance.report.row_page import WRITTEN, index_page, row_page
from conformance.report.upstream_page import upstream_page
from conformance.report.verdict_page import verdict_page
from conformance.report.view import View
from conformance.results import FILE_NAME, read_results

DOCS, REPORTS = ROOT / "docs", ROOT / "reports"
ROWS = "rows"


def pages(reports: Path = REPORTS) -> dict[str, str]:
    """Path under `docs/` -> text. The same rows, results and code give the same pages."""
    matrix = load_matrix()
    known = load_known(matrix=matrix)
    # `runs/` holds each machine's own runs, one level further down.
    views = [View(read_results(path), matrix.rows) for path in sorted(reports.glob(f"*/{FILE_NAME}"))]
    rows = {f"{ROWS}/{row.id}.md": row_page(row, views, known) for row in matrix.rows}
    others = {
        "verdicts.md": verdict_page(matrix.rows),
        "npu-operators.md": operators_page(read_facts()),
        "known-upstream.md": upstream_page(matrix.rows, known),
    }
    return {f"{ROWS}/index.md": index_page(matrix.rows, views), **rows, **others}


def differing(docs: Path, wanted: dict[str, str]) -> list[str]:
    """Pages that are not as wanted, in order: other text, missing, or left over from a row that is gone."""
    return sorted(name for name in {*wanted, *_left_over(docs, wanted)} if _read(docs / name) != wanted.get(name))


def write(docs: Path, wanted: dict[str, str]) -> list[str]:
    """Make the pages as wanted; those that changed. UsageFault when the disk does not take them."""
    changed = differing(docs, wanted)
    for name in changed:
        path = docs / name
        try:
            if name in wanted:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(wanted[name], encoding="utf-8")
            else:
                path.unlink()
        except OSError as fault:
            raise UsageFault(f"{path}: cannot be written: {fault.strerror}") from None
    return changed


def _left_over(docs: Path, wanted: dict[str, str]) -> list[str]:
    """Pages that the generator wrote once and would not write now; what somebody wrote by hand is left alone."""
    found = [path for path in (docs / ROWS).glob("*.md") if f"{ROWS}/{path.name}" not in wanted]
    return [f"{ROWS}/{path.name}" for path in found if (_read(path) or "").startswith(WRITTEN)]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
