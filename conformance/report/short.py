"""The short table: a line per row and spelling, one verdict per role, for a README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from conformance.errors import UsageFault
from conformance.matrix import ROLES, Role, Row
from conformance.report.markdown import code, escape, table
from conformance.report.words import VERDICT_SIGNS, WORDS
from conformance.results import ResultSet
from conformance.verdict import Verdict, conclude

BEGIN = "<!-- table: written by python -m conformance table -->"
END = "<!-- end of table -->"


def short_table(results: ResultSet, rows: Sequence[Row]) -> str:
    """Markdown: what was run and on what, then the table."""
    header, words = results.header, WORDS["en"]
    stack = ", ".join(
        f"{p.name} {p.version}" + (f" ({p.commit})" if p.commit else "")
        for p in header.stack
        if p.name in ("verl", "megatron-core", "mindspeed", "torch")
    )
    head = f"Backend {header.backend}, {words.devices[header.device]}, {escape(stack)}; float32 and bfloat16."
    if not results.complete:
        head = f"**{words.incomplete}** {head}"
    lines = []
    for row in rows:
        if row.id not in header.rows:
            continue
        conclusions = {
            role: conclude(row, [r for r in results.checks if (r.row, r.role) == (row.id, role)], header.precisions)
            for role in ROLES
        }
        for variant in row.variant_names:
            keys = ", ".join(dict.fromkeys(s.key.rpartition(".")[2] for s in row.spelling(variant).settings))
            companions = ", ".join(c.key.rpartition(".")[2] for c in row.spelling(variant).companions)
            name = escape(row.name) if variant == "documented" else f"↳ {variant}"
            verdicts = [_word(conclusions[role].by_variant[variant]) for role in ROLES]
            lines.append(
                [name, code(keys) + (f" with {code(companions)}" if companions else ""), *verdicts, _why(results, row, variant)]
            )
    return f"{head}\n\n{table(['row', 'keys', 'actor', 'ref', 'what was seen (actor)'], lines)}"


def _word(verdict: Verdict) -> str:
    return f"{VERDICT_SIGNS[verdict]} {WORDS['en'].verdicts[verdict][0]}"


def _why(results: ResultSet, row: Row, variant: str) -> str:
    """The summary of the first check of the actor that did not pass, else of `engaged`."""
    role: Role = "actor"
    mine = [r for r in results.checks if (r.row, r.role, r.variant) == (row.id, role, variant)]
    shown = next((r for r in mine if r.outcome != "pass"), None) or next((r for r in mine if r.check == "engaged"), None)
    return escape(shown.summary, 140) if shown else ""


def insert(path: Path, text: str) -> None:
    """Put the text between the two marks of a Markdown file, in place of what is there."""
    content = path.read_text(encoding="utf-8")
    before, begin, rest = content.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageFault(f"{path}: no place for a table; right form: a line {BEGIN!r} and a line {END!r}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
