"""The documentation's page of one row: how to set it, what happened on each published stack, and the known faults."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

from conformance.explain import HINTS, role_overrides
from conformance.known import KnownIssue
from conformance.matrix import ROLES, Role, Row
from conformance.report.markdown import code, escape, row_details, table
from conformance.report.short import run_line
from conformance.report.view import View, stack_name
from conformance.report.words import OUTCOME_SIGNS, VERDICT_SIGNS, WORDS
from conformance.results import CHECKS, Check, Outcome
from conformance.verdict import Verdict

WRITTEN = "<!-- Written by `python -m conformance docs`. Do not edit: change what it is written from and run that again. -->"

_CLASSES = {
    "identical": "bitwise the same as without it",
    "reordered": "the same but for the order of sums",
    "kernel": "another kernel: as near to the exact result as the one it replaces",
}
_WORDS = WORDS["en"]


def row_page(row: Row, views: Sequence[View], known: Sequence[KnownIssue]) -> str:
    """The whole page. `views` are the published result sets, each through the whole matrix."""
    blocks = [WRITTEN, f"# {escape(row.name)}: {escape(row.title.en)}", *_facts(row), *_how_to_set(row)]
    return "\n\n".join([*blocks, *_what_happens(row, views), *_faults(row, known)]) + "\n"


def index_page(rows: Sequence[Row], views: Sequence[View]) -> str:
    """The page above the rows' pages: each row's verdicts on each stack."""
    columns = ["row", *(_stack(v) for v in views)]
    lines = [[f"[{escape(row.name)}]({row.id}.md): {escape(row.title.en)}", *(_cell(v, row) for v in views)] for row in rows]
    legend = "\n".join(f"- {_verdict(v)}: {_WORDS.verdicts[v][1]}" for v in Verdict)
    toc = "\n".join(row.id for row in rows)
    stacks = "\n".join(f"- **{_stack(v)}**: {run_line(v.results)}" for v in views)
    return "\n\n".join(
        [
            WRITTEN,
            "# The rows",
            "One page a row: how to set it, what goes with it, what happens on each stack, and the known faults. "
            "The verdicts are those of the runs published in `reports/`; a cell has one where it is the same for actor and ref.",
            table(columns, lines),
            legend,
            f"```{{toctree}}\n:maxdepth: 1\n:hidden:\n\n{toc}\n```",
            "## The stacks",
            stacks or "No run is published.",
        ]
    ) + "\n"  # fmt: skip


def _facts(row: Row) -> Iterator[str]:
    sizes = ", ".join(code(f"{name}={size}") for name, size in row.topology.sizes().items())
    yield "\n".join(
        [
            f"- id: {code(row.id)}; in Chinese: {escape(row.title.zh)}",
            f"- status on the upstream page: {row.status}; implemented by {row.implemented_by}",
            f"- tested with: the {row.model} model on {', '.join(_ranks(row))}" + (f", {sizes} in every run" if sizes else ""),
            f"- numbers asked for: {row.parity}, {_CLASSES[row.parity]} (see [verdicts](../verdicts.md))",
        ]
    )
    if row.note:
        yield escape(row.note.en)


def _ranks(row: Row) -> Iterator[str]:
    """How many ranks the runs have; a variant is named where it has another number."""
    yield f"{row.world_size} rank{'s' if row.world_size > 1 else ''}"
    others = {name: row.ranks(name) for name in row.variant_names if row.ranks(name) != row.world_size}
    yield from (f"{ranks} for the variant {code(name)}" for name, ranks in others.items())


def _how_to_set(row: Row) -> Iterator[str]:
    yield "## How to set it"
    for variant in row.variant_names:
        spelling = row.spelling(variant)
        yield "### As documented" if variant == "documented" else f"### Variant {code(variant)}"
        if spelling.note:
            yield escape(spelling.note.en)
        if spelling.companions:
            # A companion is often given under both roles.
            names = dict.fromkeys(companion.key.rpartition(".")[2] for companion in spelling.companions)
            yield "Companions, which must go with it: " + ", ".join(code(name) for name in names) + "."
        for role in ROLES:
            overrides, inherited = role_overrides(row, variant, role)
            if inherited:
                yield f"For the {role}: nothing more, it inherits the actor's."
            else:
                lines = " \\\n".join(shlex.quote(text) for text in overrides)
                yield f"For the {role}:\n\n```sh\n{lines}\n```"
    yield "\n".join(f"- {escape(hint)}" for hint in HINTS)


def _what_happens(row: Row, views: Sequence[View]) -> Iterator[str]:
    yield "## What happens"
    shown = [view for view in views if row in view.rows]
    if not shown:
        yield "No published run has this row."
    for view in shown:
        yield f"### {_stack(view)}"
        yield run_line(view.results)
        lines = [
            [
                _WORDS.documented if variant == "documented" else escape(variant),
                role,
                _verdict(view.conclusion(row, role).by_variant[variant]),
                *(_outcomes(view, row, role, variant, check) for check in CHECKS),
            ]
            for variant in row.variant_names
            for role in ROLES
        ]
        yield table(["spelling", "role", "verdict", *CHECKS], lines)
        yield row_details(view, row, "en")


def _faults(row: Row, known: Sequence[KnownIssue]) -> Iterator[str]:
    yield "## Known faults"
    mine = [issue for issue in known if issue.row == row.id]
    if not mine:
        yield "None is listed in `known_issues.yaml`."
        return
    yield "What a run is expected to show, from `known_issues.yaml`:"
    yield "\n".join(_fault(issue) for issue in mine)


def _fault(issue: KnownIssue) -> str:
    versions = ", ".join(f"{package} {wanted}" for package, wanted in issue.versions.items())
    where = [issue.check, *([issue.precision] if issue.precision else []), " and ".join(issue.roles)]
    where += [_WORDS.documented if issue.variant == "documented" else f"variant {issue.variant}", f"backend {issue.backend}"]
    where += [f"route {issue.route}"] if issue.route else []
    raised = f" with {code(issue.exception)}" if issue.exception else ""
    said = f", saying {code(issue.contains)}"
    head = f"{escape(', '.join(where))}" + (f"; {escape(versions)}" if versions else "")
    return f"- {head}: {_outcome(issue.outcome)}{raised}{said}. {escape(issue.reason)} ([upstream]({target(issue.link)}))"


def target(link: str) -> str:
    """A link's address in angle brackets; what would end or escape them is written as URLs write it."""
    return "<" + re.sub(r"[<>\\`|]", lambda match: f"%{ord(match[0]):02X}", link) + ">"


def _outcomes(view: View, row: Row, role: Role, variant: str, check: Check) -> str:
    records = view.records(row, role, variant, check)
    texts = [_outcome(r.outcome) + (f" ({r.precision})" if r.precision else "") for r in records]
    return " ".join(texts) or _outcome("not_run")


def _outcome(outcome: Outcome) -> str:
    return f"{OUTCOME_SIGNS[outcome]} {_WORDS.outcomes[outcome]}"


def _verdict(verdict: Verdict) -> str:
    return f"{VERDICT_SIGNS[verdict]} {_WORDS.verdicts[verdict][0]}"


def _cell(view: View, row: Row) -> str:
    """The row's verdicts on one stack; "" where the run has not the row."""
    if row not in view.rows:
        return ""
    verdicts = {role: view.conclusion(row, role).verdict for role in ROLES}
    if len(set(verdicts.values())) == 1:
        return _verdict(verdicts[ROLES[0]])
    return ", ".join(f"{role} {_verdict(verdict)}" for role, verdict in verdicts.items())


def _stack(view: View) -> str:
    """Markdown: what tells a published run from the others."""
    header = view.results.header
    untested = ", untested" if header.untested else ""
    return escape(f"{stack_name(header)}, {header.route}, {_WORDS.devices[header.device]}{untested}")
