"""The support table as one HTML file that needs nothing else: no network, no server, and for reading no script.

All text goes through `one_line` and is escaped. The page's policy admits its own style and script, by their hashes, and
nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from conformance.matrix import ROLES, Role, Row, override_text
from conformance.report.history import History, Mark, spans
from conformance.report.sentences import said
from conformance.report.text import one_line
from conformance.report.view import Detail, View, detail_of, run_sentence
from conformance.report.words import OUTCOME_SIGNS, VERDICT_SIGNS, WORDS
from conformance.results import CHECKS, Check, CheckRecord, Outcome, ResultSet
from conformance.verdict import Verdict, of_check

HERE = Path(__file__).resolve().parent
#: Longest text in characters and longest list that the page shows; it says what it leaves out.
TEXT, ITEMS = 2000, 100

#: How grave a verdict looks. Colour and shape only repeat what sign and word say.
_TONES = {
    **dict.fromkeys((Verdict.WORKS, Verdict.WITH_COMPANIONS, Verdict.OTHER_SPELLING), "good"),
    **dict.fromkeys((Verdict.ALWAYS_ON, Verdict.NO_EFFECT), "odd"),
    **dict.fromkeys((Verdict.WRONG_NUMBERS, Verdict.REFUSED, Verdict.BROKEN, Verdict.ERROR), "bad"),
    **dict.fromkeys((Verdict.NOT_RUN, Verdict.NOT_APPLICABLE), "quiet"),
}


@dataclass(frozen=True)
class ShownRecord:
    """A record as a panel shows it; `left_out` counts what was too much."""

    record: CheckRecord
    detail: Detail
    left_out: int
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Cell:
    """One check of one line under one role."""

    role: Role
    check: Check
    records: tuple[ShownRecord, ...]


@dataclass(frozen=True)
class Side:
    """One role's half of a line: the verdict, the spelling that decided it if it is another, whose failure it is, the checks."""

    role: Role
    verdict: Verdict
    by: str | None
    owner: str | None
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Line:
    """One spelling of a row: a line of the grid."""

    row: Row
    variant: str
    keys: tuple[str, ...]
    companions: tuple[str, ...]
    sides: tuple[Side, ...]


def render_page(shown: ResultSet, runs: Sequence[ResultSet], rows: Sequence[Row]) -> str:
    """The whole page of `shown`, with the history over `runs` (`shown` among them or not). Same input, same text."""
    view, history = View(shown, rows), History([*runs, shown])
    style, script = (Markup((HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    lines = [line for row in view.rows for line in _lines(view, history, row)]
    return _environment().get_template("page.html.j2").render(
        header=shown.header,
        complete=shown.complete,
        gone=[i for i in shown.header.rows if i not in {row.id for row in view.rows}][:ITEMS],
        tables={kind: [line for line in lines if line.row.table == kind] for kind in WORDS["en"].tables},
        verdicts=[v for v in Verdict if any(side.verdict is v for line in lines for side in line.sides)],
        runs=history.runs,
        shown=shown,
        bound_level=history.bound_level,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )  # fmt: skip


def shell(text: str) -> Markup:
    """One word of a POSIX shell, in quotes where it needs them; what cannot be printed becomes a space."""
    printable = text if text.isprintable() and len(text) <= TEXT else one_line(text, TEXT)
    return escape(shlex.quote(printable))


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_finalize,
    )
    environment.globals.update(
        W=WORDS, ROLES=ROLES, CHECKS=CHECKS, VERDICTS=list(Verdict), VERDICT_SIGNS=VERDICT_SIGNS, OUTCOME_SIGNS=OUTCOME_SIGNS
    )  # fmt: skip
    environment.filters.update(
        shell=shell, spans=spans, verdict_tone=_TONES.__getitem__, tone=_tone, run_sentence=run_sentence, said=said
    )  # fmt: skip
    return environment


def _finalize(value: Any) -> Any:
    return one_line(value, TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value


def _tone(outcome: Outcome, check: Check) -> str:
    return _TONES[of_check(check, outcome)]


def _hash(text: str) -> Markup:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(f"'sha256-{digest}'")


def _lines(view: View, history: History, row: Row) -> Iterator[Line]:
    for variant in row.variant_names:
        spelling = row.spelling(variant)
        yield Line(
            row=row,
            variant=variant,
            keys=tuple(override_text(s.key, s.on, "plain") for s in spelling.settings),
            companions=tuple(override_text(c.key, c.value, "plain") for c in spelling.companions),
            sides=tuple(_side(view, history, row, variant, role) for role in ROLES),
        )


def _side(view: View, history: History, row: Row, variant: str, role: Role) -> Side:
    """The documented spelling has the row's own verdict; a variant has what it came to by itself."""
    conclusion = view.conclusion(row, role)
    documented = variant == "documented"
    return Side(
        role=role,
        verdict=conclusion.verdict if documented else conclusion.by_variant[variant],
        by=conclusion.variant if documented and conclusion.variant != "documented" else None,
        owner=conclusion.owners.get(variant) if not documented or conclusion.variant == "documented" else None,
        cells=tuple(
            Cell(role, check, tuple(_shown(r, history) for r in view.records(row, role, variant, check))) for check in CHECKS
        ),
    )


def _shown(record: CheckRecord, history: History) -> ShownRecord:
    detail = detail_of(record)
    cut = replace(
        detail,
        forms=tuple(replace(f, overrides=f.overrides[:ITEMS]) for f in detail.forms[:ITEMS]),
        figures=detail.figures[:ITEMS],
        evidence=detail.evidence[:ITEMS],
    )
    lists = (detail.forms, detail.figures, detail.evidence, *(f.overrides for f in detail.forms))
    left_out = sum(max(0, len(items) - ITEMS) for items in lists)
    marks = history.of(record) if len(history.runs) > 1 else ()
    return ShownRecord(record, cut, left_out, marks)
