"""The documentation's page on how verdicts are reached, written from the code that reaches them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

from conformance import diff, parity, promote
from conformance.matrix import Row
from conformance.report.markdown import code, escape, table
from conformance.report.row_page import WRITTEN
from conformance.report.words import OUTCOME_SIGNS, VERDICT_SIGNS, WORDS
from conformance.results import CHECKS, OUTCOMES, PRECISIONS
from conformance.runner import scales_of
from conformance.verdict import GRAVITY, Verdict, conclude, of_check

_WORDS = WORDS["en"]

_CHECKS = """\
A row has three checks for each role (actor, ref) and each spelling:

- **accepted**: verl's own configuration takes the key, written plain, with `+` or with `++`, and it reaches the engine.
- **engaged**: with the key on, the row's evidence is there; with the key off, it is not. Each side runs in fresh processes.
- **parity**: log-probs, entropy, loss, gradient norm and updated weights are those of one rank with everything off."""


def verdict_page(rows: Sequence[Row]) -> str:
    """The whole page. `rows` name the models for which bounds are given."""
    blocks = [WRITTEN, "# How verdicts are reached", _CHECKS, *_outcomes(), *_verdicts(), *_bounds(rows)]
    blocks += ["## When two runs are compared", prose(diff), "## When a row may move up", prose(promote)]
    return "\n\n".join(blocks) + "\n"


def prose(of: ModuleType | Callable[..., object]) -> str:
    """A docstring of this project as Markdown: only code spans keep their meaning."""
    parts = re.split(r"(`[^`\n]+`)", inspect.getdoc(of) or "")
    return "".join(part if part.startswith("`") else re.sub(r"([*_<>\[\]|$\\])", r"\\\1", part) for part in parts)


def _outcomes() -> Iterator[str]:
    yield "## From an outcome to a verdict"
    yield "What one check alone comes to:"
    lines = [[f"{OUTCOME_SIGNS[o]} {_WORDS.outcomes[o]}", *(_verdict(of_check(check, o)) for check in CHECKS)] for o in OUTCOMES]
    yield table(["outcome", *CHECKS], lines)


def _verdicts() -> Iterator[str]:
    yield "## From checks to a row"
    yield "For one spelling the gravest check decides, from harmless to grave: " + ", ".join(_verdict(v) for v in GRAVITY) + "."
    yield "A check without a record was not run. Parity is wanted in each precision that the run was asked for."
    yield prose(conclude)
    yield "\n".join(f"- {_verdict(v)}: {_WORDS.verdicts[v][1]}" for v in Verdict)


def _bounds(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Bounds"
    yield prose(parity)
    factors = [(name, getattr(parity, name)) for name in ("RMS_FACTOR", "MAX_FACTOR", "KERNEL_FACTOR")]
    yield table(["factor", "value"], [[code(name), f"{value:g}"] for name, value in factors])
    yield "The relative bounds that follow for the models of the suite:"
    columns = ["model", "layers", "precision", "unit roundoff u", "forward", "forward and backward"]
    yield table(columns, [line for model in dict.fromkeys(row.model for row in rows) for line in _bound_lines(model)])
    yield "The classes of the rows:"
    lines = [[f"[{escape(row.name)}](rows/{row.id}.md)", row.parity, row.model, ", ".join(row.precisions)] for row in rows]
    yield table(["row", "class", "model", "precisions"], lines)


def _bound_lines(model: str) -> Iterator[list[str]]:
    scales = scales_of(model)
    for precision in PRECISIONS:
        bounds = [f"{scales.relative(precision, passes):.3g}" for passes in (1, 2)]
        yield [model, str(scales.layers), precision, f"{parity.UNIT_ROUNDOFF[precision]:.3g}", *bounds]


def _verdict(verdict: Verdict) -> str:
    return f"{VERDICT_SIGNS[verdict]} {_WORDS.verdicts[verdict][0]}"
