"""The short table: a line per row and spelling, one verdict per role, for a README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conformance.errors import UsageFault
from conformance.matrix import ROLES, Role, Row
from conformance.replace import replace_file
from conformance.report.markdown import code, escape, table
from conformance.report.view import View
from conformance.report.words import OUTCOME_SIGNS, VERDICT_SIGNS, WORDS
from conformance.results import Outcome, ResultSet
from conformance.verdict import Conclusion

BEGIN = "<!-- table: written by python -m conformance table -->"
END = "<!-- end of table -->"


def short_table(results: ResultSet, rows: Sequence[Row]) -> str:
    """Markdown: what was run and on what, then the table."""
    lines = []
    view = View(results, rows)
    for row in view.rows:
        for variant in row.variant_names:
            keys = ", ".join(dict.fromkeys(s.key.rpartition(".")[2] for s in row.spelling(variant).settings))
            companions = ", ".join(dict.fromkeys(c.key.rpartition(".")[2] for c in row.spelling(variant).companions))
            name = escape(row.name) if variant == "documented" else f"↳ {variant}"
            verdicts = [verdict_text(view.conclusion(row, role), variant) for role in ROLES]
            written = code(keys) + (f" with {code(companions)}" if companions else "")
            line = [name, written, *verdicts, _why(results, row, variant)]
            lines.append([*line, _operators(view, row, variant)] if results.operators else line)
    columns = ["row", "keys", "actor", "ref", "what was seen (actor)", *(["operators"] if results.operators else [])]
    return f"{run_line(results)}\n\n{table(columns, lines)}"


def _operators(view: View, row: Row, variant: str) -> str:
    """How many generated cases the row's operators were run on, and the worst error over the expected rounding error."""
    records = [record for _, record in view.operators(row) if record is not None] if variant == "documented" else []
    if not records:
        return ""
    worst = max((r.worst_ratio for r in records if r.worst_ratio is not None), default=None)
    outcome: Outcome = next((r.outcome for r in records if r.outcome != "pass"), "pass")
    ratio = "" if worst is None else f", worst error {worst:.2g}×"
    return f"{OUTCOME_SIGNS[outcome]} {sum(r.cases for r in records)} cases{ratio}"


def run_line(results: ResultSet) -> str:
    """Markdown: what a run was made with, on one line."""
    header, words = results.header, WORDS["en"]
    stack = ", ".join(
        f"{p.name} {p.version}" + (f" ({p.commit})" if p.commit else "")
        for p in header.stack
        if p.name in ("verl", "megatron-core", "mindspeed", "torch")
    )
    where = f"Backend {header.backend}, {words.devices[header.device]}, {escape(stack)}, route {header.route}"
    head = f"{where}; {' and '.join(header.precisions)}."
    head += "".join(f" {words.untested}: {escape(line.rstrip('.'))}." for line in header.untested)
    head += "".join(f" {words.deviation}: {escape(line.rstrip('.'))}." for line in header.deviations)
    if not header.complete_selection:
        head = f"**{words.partial.format(rows=escape(', '.join(header.rows)))}** {head}"
    return head if results.complete else f"**{words.incomplete}** {head}"


def verdict_text(conclusion: Conclusion, variant: str) -> str:
    """The word, and whose failure it is."""
    verdict, owner = conclusion.by_variant[variant], conclusion.owners.get(variant)
    return f"{VERDICT_SIGNS[verdict]} {WORDS['en'].verdicts[verdict][0]}" + (f": {escape(owner)}" if owner else "")


def _why(results: ResultSet, row: Row, variant: str) -> str:
    """The summary of the first check of the actor that did not pass, else of `engaged`."""
    role: Role = "actor"
    mine = [r for r in results.checks if (r.row, r.role, r.variant) == (row.id, role, variant)]
    shown = next((r for r in mine if r.outcome != "pass"), None) or next((r for r in mine if r.check == "engaged"), None)
    return escape(shown.summary, 140) if shown else ""


def insert(path: Path, text: str, marks: tuple[str, str] = (BEGIN, END)) -> None:
    """Put the text between the two marks of a Markdown file, in place of what is there."""
    try:
        content = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise UsageFault(f"{path}: not UTF-8; right form: a Markdown file in UTF-8") from None
    before, begin, rest = content.partition(marks[0])
    _old, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise UsageFault(f"{path}: no place for a table; right form: a line {marks[0]!r} and a line {marks[1]!r}")
    replace_file(path, f"{before}{begin}\n{text}\n{end}{after}".encode())
