"""Taking up an interrupted run: its checks are not made again, and the new run's file begins with them.

The operators are tested anew: results do not say under which profile they were.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from conformance.errors import UsageFault
from conformance.results import CheckRecord, Header, Package, read_results

RIGHT_FORM = "right form: --resume with the options, packages and matrix of that run, or a run without --resume"
#: What a run may differ in from the one that it takes up.
_FREE = frozenset({"started"})


@dataclass(frozen=True)
class Earlier:
    """What an interrupted run has left. Our own failures are not among its checks: they are tried again."""

    path: Path
    header: Header
    checks: dict[tuple[str, str, str, str, str | None], CheckRecord]

    def require_same(self, header: Header) -> None:
        """UsageFault when this run, by its header, is not the one that was interrupted: its checks would not be of one stack."""
        for field in fields(Header):
            if field.name not in _FREE and getattr(self.header, field.name) != getattr(header, field.name):
                there, here = _difference(getattr(self.header, field.name), getattr(header, field.name))
                raise UsageFault(f"--resume {self.path}: {field.name} was {there} there and is {here} now; {RIGHT_FORM}")


def load_earlier(path: Path) -> Earlier:
    """Read an interrupted run, its directory or its file; UsageFault for one that came to its end, and for a bad file."""
    results = read_results(path)
    if results.complete:
        raise UsageFault(f"--resume {path}: that run came to its end; right form: the directory of an interrupted run")
    return Earlier(path, results.header, {record.name: record for record in results.checks if record.outcome != "error"})


def _difference(there: object, here: object) -> tuple[str, str]:
    """The two values, or the first items in which two sequences differ, as text of bounded length."""
    if isinstance(there, tuple) and isinstance(here, tuple):
        mine, theirs = [x for x in here if x not in there], [x for x in there if x not in here]
        return _items(theirs), _items(mine)
    return str(there)[:60], str(here)[:60]


def _items(items: list[object]) -> str:
    texts = [f"{item.name} {item.version} ({item.path})" if isinstance(item, Package) else str(item) for item in items[:2]]
    return (", ".join(texts) or "nothing else")[:200]
