"""engaged: does setting the key change what runs, compared with setting it off? Judged two-sided, by what ran.

- `pass`: the evidence is there with the key on, and absent with the key explicitly off.
- `always_on`: the evidence is there either way (or off is turned away): the key decides nothing.
- `no_effect`: the evidence is missing with the key on, and nothing that the probes see differs between on and off.
- `fail`: the key changes something, but not into what the row promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from conformance.matrix import Evidence
from conformance.probes import Facts

Outcome = Literal["pass", "always_on", "no_effect", "fail"]

#: Facts that count reads, not effects: reading a key is not yet doing something about it.
_NOT_EFFECTS = ("reads.",)


@dataclass(frozen=True)
class Judgement:
    outcome: Outcome
    summary: str
    lines: tuple[str, ...]


def judge(evidence: Sequence[Evidence], on: Sequence[Facts], off: Sequence[Facts]) -> Judgement:
    """Compare the facts of the ranks of the on-run with those of the off-run. Both have one Facts per rank, in order."""
    lines: list[str] = []
    there, absent = True, True
    for item in evidence:
        on_values, off_values = [f.get(item.fact) for f in on], [f.get(item.fact) for f in off]
        for verdict, side in (
            (item.judge_on(on_values), "on"),
            (item.judge_off(off_values), "off"),
            (item.judge_change(on_values, off_values), "change"),
        ):
            if verdict is None:
                continue
            lines.append(f"{'yes' if verdict.holds else 'NO'} [{side}] {verdict.text}")
            if not verdict.holds:
                if side == "off":
                    absent = False
                else:
                    there = False
    if lines and there and absent:
        return Judgement("pass", "on as promised, off without it", tuple(lines))
    changed = differing(on, off)
    in_both = holds_on(evidence, on) and holds_on(evidence, off)
    if not changed:
        if in_both:
            return Judgement("always_on", "the same runs with the key on and off: it cannot be switched off", tuple(lines))
        return Judgement("no_effect", "nothing that ran differs between on and off", tuple(lines))
    if in_both:
        return Judgement("always_on", "what the key promises runs with it off, too", tuple(lines))
    seen = "; ".join(changed[:4])
    return Judgement("fail", f"the key changes something else than promised: {seen}", tuple(lines))


def holds_on(evidence: Sequence[Evidence], on: Sequence[Facts]) -> bool:
    """Whether every `on` condition holds in the run with the key on (and there is one)."""
    judged = [item.judge_on([f.get(item.fact) for f in on]) for item in evidence]
    stated = [verdict for verdict in judged if verdict is not None]
    return bool(stated) and all(verdict.holds for verdict in stated)


def differing(on: Sequence[Facts], off: Sequence[Facts]) -> list[str]:
    """Facts that differ between the two runs, one line each, most telling families first."""
    found: list[str] = []
    for rank, (left, right) in enumerate(zip(on, off, strict=True)):
        for name in sorted({*left, *right}):
            a, b = left.get(name, 0), right.get(name, 0)
            if a != b and not name.startswith(_NOT_EFFECTS):
                found.append(f"{name} on rank {rank}: {a} (off: {b})")
    return found
