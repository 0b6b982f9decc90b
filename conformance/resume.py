"""Taking up an interrupted run: its checks are not made again, and the new run's file begins with them.

The operators are tested anew: results do not say under which profile they were.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

from conformance.errors import UsageFault
from conformance.results import CheckRecord, Header, Package, read_results
from conformance.stack import CHANGED

RIGHT_FORM = "right form: --resume with the options, packages and matrix of that run, or a run without --resume"
#: What is known of a run before its stack is imported.
SELECTION = ("matrix_sha256", "rows", "backend", "route", "complete_selection")

#: The start alone may differ.
ALL = tuple(field.name for field in fields(Header) if field.name != "started")


@dataclass(frozen=True)
class Earlier:
    """What an interrupted run has left. Our own failures are not among its checks: they are tried again."""

    path: Path
    header: Header
    checks: dict[tuple[str, str, str, str, str | None], CheckRecord]

    def require_same(self, header: Header, names: Collection[str] = ALL) -> None:
        """UsageFault when this run, by these fields of its header, is not the one that was interrupted.

        Nor may a checkout have changes of its own, for nobody could tell whether they are the same. Not compared: the code of
        this suite, and which tests a `-k` leaves out.
        """
        for name in names:
            there, here = getattr(self.header, name), getattr(header, name)
            if there != here:
                shown_there, shown_here = _difference(there, here)
                raise UsageFault(f"--resume {self.path}: {name} was {shown_there} there and is {shown_here} now; {RIGHT_FORM}")
        changed = [package.name for package in self.header.stack if (package.commit or "").endswith(CHANGED)]
        if changed:
            raise UsageFault(f"--resume {self.path}: {changed[0]}'s checkout had changes of its own there; {RIGHT_FORM}")


def load_earlier(path: Path) -> Earlier:
    """Read an interrupted run, its directory or its file; UsageFault for one that came to its end, and for a bad file."""
    results = read_results(path)
    if results.complete:
        raise UsageFault(f"--resume {path}: that run came to its end; right form: the directory of an interrupted run")
    return Earlier(path, results.header, {record.name: record for record in results.checks if record.outcome != "error"})


def _difference(there: object, here: object) -> tuple[str, str]:
    """The two values as text of bounded length; of two lists of packages the first in which they differ."""
    if isinstance(there, tuple) and isinstance(here, tuple) and any(isinstance(item, Package) for item in (*there, *here)):
        mine, theirs = [x for x in here if x not in there], [x for x in there if x not in here]
        return _items(theirs), _items(mine)
    return _text(there), _text(here)


def _text(value: object) -> str:
    return ((", ".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value))[:200]


def _items(items: list[Package]) -> str:
    texts = [f"{item.name} {item.version} ({item.path})" for item in items[:2]]
    return (", ".join(texts) or "nothing else")[:200]
