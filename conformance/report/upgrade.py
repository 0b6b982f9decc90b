"""What an upgrade changes, key by key: a line per spelling and role whose verdict is another, for a README."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.diff import compare
from conformance.matrix import ROLES, Row
from conformance.report.markdown import code, escape, table
from conformance.report.short import run_line, verdict_text
from conformance.report.view import View
from conformance.results import ResultSet

BEGIN = "<!-- upgrade: written by python -m conformance diff -->"
END = "<!-- end of upgrade -->"


def upgrade_table(old: ResultSet, new: ResultSet, rows: Sequence[Row]) -> str:
    """Markdown: the two runs, what makes them hard to compare, then the table. Both are whole, see `diff.read_whole`."""
    before, after = View(old, rows), View(new, rows)
    lines = []
    for row in rows:
        if row not in before.rows or row not in after.rows:
            continue
        for variant in row.variant_names:
            for role in ROLES:
                sides = [verdict_text(view.conclusion(row, role), variant) for view in (before, after)]
                if sides[0] != sides[1]:
                    keys = ", ".join(dict.fromkeys(s.key.rpartition(".")[2] for s in row.spelling(variant).settings))
                    name = escape(row.name) if variant == "documented" else f"{escape(row.name)} ({variant})"
                    lines.append([name, code(keys), role, *sides])
    heads = [f"From: {run_line(old)}", f"To: {run_line(new)}"]
    notes = compare(old, new, rows).notes
    if notes:
        heads.append("\n".join(f"- Note: {escape(note)}." for note in notes))
    if not lines:
        return "\n\n".join([*heads, "No verdict changes."])
    return "\n\n".join([*heads, table(["row", "keys", "role", "before", "after"], lines)])
