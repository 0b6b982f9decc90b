"""How one check came out in run after run: what the page draws as a strip of marks and, for figures, as a line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from conformance.errors import UsageFault
from conformance.report.view import detail_of
from conformance.results import FILE_NAME, CheckRecord, Outcome, ResultSet, read_results

#: Result sets on one page. A strip of more marks cannot be read.
MAX_RUNS = 100
#: What `checks` writes for a figure: `1.43e-06 (bound 1.06e-05) at ...`.
_FIGURE = re.compile(r"(\S{1,30}) \(bound (\S{1,30})\)")
#: Decades below and above the bound that the line shows; what lies outside is drawn at the edge.
_DECADES_BELOW, _DECADES_ABOVE = 4.0, 1.0

Name = tuple[str, str, str, str, str | None]


@dataclass(frozen=True)
class Mark:
    """One run's outcome. `number` counts the runs from 1; `share` is the worst difference / bound, None without figures."""

    number: int
    started: str
    outcome: Outcome
    share: float | None

    @property
    def level(self) -> float | None:
        """The share on a log scale: 0 is the top edge of the line, 1 the bottom."""
        if self.share is None:
            return None
        decades = math.log10(self.share) if self.share > 0 else -math.inf
        return (_DECADES_ABOVE - min(max(decades, -_DECADES_BELOW), _DECADES_ABOVE)) / (_DECADES_ABOVE + _DECADES_BELOW)


@dataclass(frozen=True)
class Span:
    """Runs in a row with one outcome: the strip in words."""

    first: int
    last: int
    outcome: Outcome


class History:
    """The runs in the order of their start; a result set that was given twice counts once."""

    #: Where the bound lies between the top edge (0) and the bottom edge (1).
    bound_level = _DECADES_ABOVE / (_DECADES_ABOVE + _DECADES_BELOW)

    def __init__(self, runs: Sequence[ResultSet]) -> None:
        different = [run for number, run in enumerate(runs) if run not in runs[:number]]
        self.runs = tuple(sorted(different, key=lambda run: run.header.started))
        self._marks: dict[Name, list[Mark]] = {}
        for number, run in enumerate(self.runs, 1):
            for record in run.checks:
                mark = Mark(number, run.header.started, record.outcome, worst_share(record))
                self._marks.setdefault(record.name, []).append(mark)

    def of(self, record: CheckRecord) -> tuple[Mark, ...]:
        """The same check in all runs that have it, the oldest first."""
        return tuple(self._marks.get(record.name, ()))


def spans(marks: Sequence[Mark]) -> Iterator[Span]:
    """Neighbouring marks of one outcome put together."""
    for outcome, group in groupby(marks, key=lambda mark: mark.outcome):
        numbers = [mark.number for mark in group]
        yield Span(numbers[0], numbers[-1], outcome)


def worst_share(record: CheckRecord) -> float | None:
    """Largest difference / bound of a record's figures; inf for NaN and for any difference where none is allowed."""
    shares = [_share(match) for _name, text in detail_of(record).figures if (match := _FIGURE.match(text))]
    return max((s for s in shares if s is not None), default=None)


def _share(match: re.Match[str]) -> float | None:
    try:
        difference, bound = float(match[1]), float(match[2])
    except ValueError:
        return None
    if math.isnan(difference) or math.isnan(bound):
        return math.inf
    return difference / bound if bound else math.inf if difference else 0.0


def read_runs(paths: Sequence[Path], directory: Path | None) -> tuple[ResultSet, ...]:
    """The given result sets in their order, after those in the directories under `directory`."""
    earlier = sorted(path.parent for path in directory.glob(f"*/{FILE_NAME}")) if directory else []
    if directory and not earlier:
        raise UsageFault(f"{directory}: no results in it; right form: a directory of runs, each with a {FILE_NAME}")
    if len(earlier) + len(paths) > MAX_RUNS:
        raise UsageFault(f"{len(earlier) + len(paths)} result sets; right form: at most {MAX_RUNS} on one page")
    return tuple(read_results(path) for path in [*earlier, *paths])
