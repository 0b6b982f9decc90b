"""TOML files from strangers: the same bounded reading, and the same one-line faults with a line, as YAML files have.

The standard parser tells no lines, so they are looked up for what a policy has: tables, arrays of tables, and their keys.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from conformance.errors import UsageFault
from conformance.yamlsource import Document, Location, display, read_bounded

MAX_BYTES = 50_000
#: The standard parser needs time in the square of a dotted key's length.
MAX_LINE = 4000
_HEADER = re.compile(r"\s*(\[{1,2})\s*([\w-]+)\s*\]")
_KEY = re.compile(r"\s*([\w-]+)\s*=")
_PLACE = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def load_toml(path: Path) -> Document:
    """Read one TOML document; UsageFault (one line) for anything else."""
    name = display(path)
    try:
        text = read_bounded(path, name, MAX_BYTES).decode("utf-8")
    except OSError as fault:
        raise UsageFault(f"{name}: cannot be read: {fault.strerror}") from None
    except UnicodeDecodeError:
        raise UsageFault(f"{name}: not UTF-8; right form: UTF-8 text") from None
    long = next((number for number, line in enumerate(text.split("\n"), 1) if len(line) > MAX_LINE), None)
    if long:
        raise UsageFault(f"{name}:{long}: longer than {MAX_LINE} characters; right form: shorter lines")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as fault:  # not only its own: also of numbers with thousands of digits
        place = _PLACE.search(str(fault))
        line = (place.group(1) if place else None) or len(text.splitlines()) or 1
        what = _PLACE.sub("", str(fault)) if isinstance(fault, tomllib.TOMLDecodeError) else "too deep or too long a value"
        raise UsageFault(f"{name}:{line}: {what}; right form: TOML, see the published schema") from None
    return Document(name, data, _lines(text), list_form='["a", "b"], or a [[name]] above each item that is a mapping')


def _lines(text: str) -> dict[Location, int]:
    lines: dict[Location, int] = {(): 1}
    at: Location = ()
    for number, line in enumerate(text.split("\n"), 1):
        if header := _HEADER.match(line):
            at = (header[2],)
            lines.setdefault(at, number)
            if header[1] == "[[":
                at = (*at, sum(1 for known in lines if known[:1] == at and len(known) == 2))
                lines[at] = number
        elif key := _KEY.match(line):
            lines.setdefault((*at, key[1]), number)
    return lines
