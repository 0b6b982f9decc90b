"""Where a run's results end up: its tables beside it, and a complete run as the one that `reports/` shows for its stack."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from conformance.errors import UsageFault
from conformance.matrix import Row
from conformance.report.markdown import render
from conformance.report.page import render_page
from conformance.report.words import Language
from conformance.results import FILE_NAME, ResultSet, read_results

TABLES: dict[Language, str] = {"en": "support-table.md", "zh": "support-table.zh.md"}
#: Beside a run's tables; not published, since `reports/` is read as Markdown.
PAGE = "support-table.html"


def write_tables(results: ResultSet, rows: Sequence[Row], directory: Path) -> None:
    """Write the tables, and the page made of them, into the run's directory; UsageFault when the disk does not take them."""
    texts = {name: render(results, rows, language) for language, name in TABLES.items()}
    for name, text in {**texts, PAGE: render_page(results, [results], rows)}.items():
        try:
            (directory / name).write_text(text, encoding="utf-8")
        except OSError as fault:
            raise UsageFault(f"{directory / name}: cannot write the table: {fault.strerror}") from None


def publish(run: Path, reports: Path, results: ResultSet) -> Path:
    """Replace `reports/<stack>/` by this run, each file whole: readers see the old one or the new one."""
    target = reports / stack_name(results)
    names = (FILE_NAME, *TABLES.values())
    try:
        target.mkdir(parents=True, exist_ok=True)
        # All copies are whole before the first takes its place, and two runs that end at once have each their own.
        with tempfile.TemporaryDirectory(dir=reports, prefix=".publishing-") as fresh:
            for name in names:
                shutil.copyfile(run / name, Path(fresh) / name)
            for name in names:
                os.replace(Path(fresh) / name, target / name)
    except OSError as fault:
        raise UsageFault(f"{target}: cannot publish the results: {fault.strerror}") from None
    return target


def published(reports: Path, results: ResultSet) -> ResultSet | None:
    """What `reports/` shows for the stack of these results so far, if it is there, readable and whole."""
    try:
        before = read_results(reports / stack_name(results))
    except UsageFault:
        return None
    return before if before.complete and before.header.complete_selection else None


def stack_name(results: ResultSet) -> str:
    """E.g. `verl0.9.1-core0.16.1-plain-emulated`. An untested combination never takes the place of the tested one."""
    versions = results.header.versions()
    header = results.header
    route = ("" if header.route == "engine" else f"-{header.route}") + ("-untested" if header.untested else "")
    return f"verl{versions.get('verl')}-core{versions.get('megatron-core')}-{header.backend}-{header.device}{route}"
