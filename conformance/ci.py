"""What a CI service shows of a run: a job summary, properties in a JUnit file, a badge."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from conformance.diff import compare, verdict_of
from conformance.known import KnownIssue, judge, match, require_one_each
from conformance.matrix import ROLES, Row
from conformance.report.difference import to_markdown
from conformance.report.markdown import escape
from conformance.report.short import short_table
from conformance.report.words import WORDS
from conformance.results import CheckRecord, Outcome, ResultSet
from conformance.verdict import NO_ANSWER

#: Names the file that GitHub Actions shows on a job's page.
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
#: What is no failure where no known issue says otherwise.
_FINE: tuple[Outcome, ...] = ("pass", "unsupported", "not_run")


def properties(record: CheckRecord) -> list[tuple[str, object]]:
    """A test's properties in the file that pytest's `--junitxml` writes."""
    names = ("row", "role", "variant", "check", "precision", "outcome")
    return [(name, getattr(record, name)) for name in names if getattr(record, name) is not None]


def unexpected(results: ResultSet, known: Sequence[KnownIssue]) -> Iterator[str]:
    """A line for each check that came out otherwise than `known_issues.yaml` expects, and each operator that fails."""
    require_one_each(known, results.header)
    for record in results.checks:
        entry = match(known, record, results.header)
        differs = judge(entry, record) if entry else None
        if differs or (entry is None and record.outcome not in _FINE):
            precision = f" {record.precision}" if record.precision else ""
            said = f" (known issue: {differs})" if differs else ""
            name = f"{record.row} {record.role} {record.variant} {record.check}{precision}"
            yield f"{name}: {record.outcome}: {record.summary}{said}"
    for operator in results.operators:
        if operator.outcome != "pass":
            yield f"operator {operator.family}: {operator.outcome}: {operator.summary}"


def summary(
    results: ResultSet, rows: Sequence[Row], known: Sequence[KnownIssue], stale: Sequence[KnownIssue], previous: ResultSet | None
) -> str:
    """Markdown for a job's page: what was not expected, the short table, and what changed since the set before.

    `stale` are the known issues that matched no check.
    """
    surprises = [*unexpected(results, known), *(f"{e.row} {e.variant} {e.check}: known issue matches no check" for e in stale)]
    said = "\n".join(["Not as expected:", "", *(f"- {escape(line, 300)}" for line in surprises)])
    blocks = ["## Conformance", said if surprises else "All checks as expected.", short_table(results, rows)]
    if previous is not None:
        blocks.append(to_markdown(compare(previous, results, rows)))
    return "\n\n".join(blocks) + "\n"


def stopped_summary(why: str) -> str:
    """Markdown for the page of a job whose run was stopped: no table is made of it."""
    return f"## Conformance\n\nNo table, for nothing can be judged: {escape(why, 300)}\n"


def summary_path(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file of the job summary, where a CI service asks for one."""
    path = environment.get(SUMMARY_VARIABLE)
    return Path(path) if path else None


def append(path: Path, text: str) -> str | None:
    """Append to the job summary; a line that says why if it cannot, since a run goes on without."""
    try:
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as fault:
        return f"{SUMMARY_VARIABLE}={path}: the job summary was not written: {fault.strerror}"
    return None


def badge(results: ResultSet, rows: Sequence[Row], known: Sequence[KnownIssue]) -> dict[str, object]:
    """A badge in the form of shields.io's endpoint: how many rows work, on what, and in red whether anything surprised.
    Green is for all of them only.

    A row works when it does under one role at least, and the other role's checks say nothing else.
    """
    verdicts = [{verdict_of(results, row, role) for role in ROLES} for row in rows if row.id in results.header.rows]
    work = sum(any(v.green for v in seen) and all(v.green or v in NO_ANSWER for v in seen) for seen in verdicts)
    surprises = sum(1 for _ in unexpected(results, known))
    message = f"{work} of {len(verdicts)} rows work ({WORDS['en'].devices[results.header.device]})"
    return {
        "schemaVersion": 1,
        "label": "verl + MindSpeed",
        "message": message + (f", {surprises} checks not as expected" if surprises else ""),
        "color": "red" if surprises else "brightgreen" if work == len(verdicts) else "yellow" if work else "orange",
    }
