"""A diff as text for a terminal, as Markdown and as JSON. Texts of results are hostile until escaped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple

from tabulate import tabulate

from conformance.diff import Change, CheckChange, Diff, FigureMove, FiguresGone, Measured, OperatorChange, PackageMove, Run
from conformance.report.markdown import escape, table
from conformance.report.text import one_line
from conformance.results import Package, json_safe

#: Gravest first. The words are what a reader sees.
CHANGES: dict[Change, str] = {
    "regressed": "regressed",
    "gone": "gone",
    "changed_outcome": "changed outcome",
    "changed_reason": "changed reason",
    "fixed": "fixed",
    "new": "new",
}
#: Longest text in a cell, in characters.
CELL = 120


class Section(NamedTuple):
    """A table. In `sentences` the last two cells of a line are sentences: old and new."""

    title: str
    columns: Sequence[str]
    lines: list[list[str]]
    sentences: bool = False


def to_json(diff: Diff) -> str:
    """One JSON document: see `diff.schema.json`."""
    return json.dumps(json_safe(asdict(diff)), ensure_ascii=False, indent=2, allow_nan=False)


def to_terminal(diff: Diff) -> str:
    """Plain text. A reader without colour loses nothing."""
    blocks = [one_line(line) for line in _head(diff)]
    for section in _sections(diff):
        lines = [[one_line(cell, CELL) for cell in line] for line in section.lines]
        blocks += ["", section.title, *(_two_sided(lines) if section.sentences else [_columns(section.columns, lines)])]
    return "\n".join([*blocks, "", one_line(summary(diff))])


def _columns(columns: Sequence[str], lines: list[list[str]]) -> str:
    return tabulate(lines, headers=list(columns), tablefmt="simple", disable_numparse=True)


def _two_sided(lines: list[list[str]]) -> list[str]:
    """Sides that are sentences go below each other: beside each other no terminal holds them."""
    return [text for *name, old, new in lines for text in (f"  {': '.join(name)}", f"      old: {old}", f"      new: {new}")]


def to_markdown(diff: Diff) -> str:
    """GitHub's Markdown, without HTML."""
    blocks = ["## What changed", escape(summary(diff)), "\n".join(f"- {escape(line)}" for line in _head(diff))]
    for section in _sections(diff):
        lines = [[escape(cell, CELL) for cell in line] for line in section.lines]
        blocks += [f"### {section.title}", table(section.columns, lines)]
    return "\n\n".join(blocks)


def summary(diff: Diff) -> str:
    """One sentence: how many of each."""
    counts = [f"{len(diff.of(change))} {word}" for change, word in CHANGES.items() if diff.of(change)]
    moved = [f"{len(diff.figures)} figures moved"] if diff.figures else []
    gone = [f"{len(diff.figures_gone)} checks lost their figures"] if diff.figures_gone else []
    operators = [f"{len(diff.operators)} operator families"] if diff.operators else []
    return f"{diff.compared} checks compared: {', '.join(counts + moved + gone + operators) or 'nothing changed'}"


def name_of(change: CheckChange | FigureMove | FiguresGone) -> str:
    """E.g. `tp actor (effective) parity float32`."""
    variant = "" if change.variant == "documented" else f" ({change.variant})"
    check = change.check if isinstance(change, CheckChange) else "parity"
    return f"{change.row} {change.role}{variant} {check}" + (f" {change.precision}" if change.precision else "")


def _head(diff: Diff) -> Iterator[str]:
    yield f"old: {_run(diff.old)}"
    yield f"new: {_run(diff.new)}"
    yield from (f"note: {note}" for note in diff.notes)


def _run(run: Run) -> str:
    return f"{run.started}, device {run.device}, backend {run.backend}, route {run.route}, matrix {run.matrix_sha256[:12]}"


def _sections(diff: Diff) -> Iterator[Section]:
    if diff.packages:
        yield Section("Packages", ("package", "old", "new"), [_package_line(move) for move in diff.packages])
    if diff.verdicts:
        lines = [[v.row, v.role, CHANGES[v.change], v.old, v.new] for v in diff.verdicts]
        yield Section("Verdicts", ("row", "role", "change", "old", "new"), lines)
    checks = [[CHANGES[kind], name_of(c), *_sides(c)] for kind in CHANGES for c in diff.of(kind)]
    if checks:
        yield Section("Checks", ("change", "check", "old", "new"), checks, sentences=True)
    if diff.operators:
        lines = [[CHANGES[o.change], o.family, *_sides(o)] for o in diff.operators]
        yield Section("Operators", ("change", "family", "old", "new"), lines, sentences=True)
    if diff.figures:
        lines = [[name_of(f), f.quantity, _measured(f.old), _measured(f.new)] for f in diff.figures]
        yield Section("Figures that moved by more than noise", ("check", "figure", "old", "new"), lines, sentences=True)
    if diff.figures_gone:
        lines = [[name_of(gone), ", ".join(gone.quantities)] for gone in diff.figures_gone]
        yield Section("Figures that are gone", ("check", "figures of the old run"), lines)


def _package_line(move: PackageMove) -> list[str]:
    sides = [_package(side) for side in (move.old, move.new)]
    if sides[0] == sides[1]:  # then it is another file
        sides = [f"{text} at {side.path if side else ''}" for text, side in zip(sides, (move.old, move.new), strict=True)]
    return [move.name, *sides]


def _package(package: Package | None) -> str:
    if package is None:
        return "absent"
    return package.version + (f" ({package.commit})" if package.commit else "")


def _sides(change: CheckChange | OperatorChange) -> list[str]:
    sides = ((change.old, change.old_reason), (change.new, change.new_reason))
    return [f"{outcome}: {reason}" if outcome else "absent" for outcome, reason in sides]


def _measured(figure: Measured) -> str:
    return f"{float(figure.difference):.3g} (bound {float(figure.bound):.3g}) at {figure.where}"
