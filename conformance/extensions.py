"""What other packages add to the suite: models and probes, found by their entry points.

- `verl_mindspeed_conformance.models`: the name is a model's name in a matrix; the value is the path of a fixture in the form of
  `fixtures/*.json`, or a function that returns one.
- `verl_mindspeed_conformance.probes`: the name is a fact family; the value is a function from verl's engine to a mapping of names
  to numbers or text.

Names come from the packages' metadata: a matrix is checked without running anybody's code. What fails in such code is the fault
of the package that the entry point belongs to, never shown as upstream's.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import os
import re
from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conformance.errors import ConformanceError, UsageFault
from conformance.probes import Facts

MODELS = "verl_mindspeed_conformance.models"
PROBES = "verl_mindspeed_conformance.probes"
_NAME = re.compile("[a-z][a-z0-9_]*")
#: What may follow the family in the name of a fact.
KEY = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"


class ExtensionFault(ConformanceError):
    """Another package's probe does not do what it is for."""


@functools.cache
def entry_points(group: str) -> Mapping[str, EntryPoint]:
    """Name -> entry point. UsageFault for a name that is none, or that two packages claim."""
    found: dict[str, EntryPoint] = {}
    for point in importlib.metadata.entry_points(group=group):
        if not _NAME.fullmatch(point.name):
            raise UsageFault(f"{described(point)}: {point.name!r} is no name for this; right form: a-z, then a-z, 0-9 and _")
        other = found.setdefault(point.name, point)
        if other is not point:
            raise UsageFault(f"{described(point)}: {described(other)} has that name, too; right form: a name of its own")
    return MappingProxyType(found)


def names(group: str, taken: Collection[str]) -> tuple[str, ...]:
    """The names that packages add to `taken`; UsageFault for one that is taken already."""
    for name, point in entry_points(group).items():
        if name in taken:
            raise UsageFault(f"{described(point)}: this suite has {name!r} itself; right form: a name of its own")
    return tuple(entry_points(group))


def described(point: EntryPoint) -> str:
    """E.g. `entry point dispatcher = own_rows:facts (own-rows 1.0)`."""
    of = f" ({point.dist.name} {point.dist.version})" if point.dist else ""
    return f"entry point {point.name} = {point.value}{of}"


def model_file(name: str) -> Path:
    """The fixture that an entry point gives; UsageFault when it fails to or gives something else."""
    point = entry_points(MODELS)[name]
    try:
        given = point.load()
        path = given() if callable(given) else given
    except Exception as error:
        raise UsageFault(f"{described(point)}: {_line(error)}") from error
    if not isinstance(path, str | os.PathLike) or not Path(path).is_file():
        raise UsageFault(f"{described(point)}: gives {str(path)[:200]!r}; right form: the path of a fixture, a JSON file")
    return Path(path)


def probe(engine: Any, families: Collection[str]) -> tuple[Facts, dict[str, str]]:
    """The facts of these families, `<family>.<key>`, and by family one line on what went wrong instead."""
    facts: Facts = {}
    faults: dict[str, str] = {}
    for family in sorted(families):
        point = entry_points(PROBES)[family]
        try:
            facts.update({f"{family}.{key}": value for key, value in _checked(point.load()(engine)).items()})
        except Exception as error:  # whatever it is: the step itself had ended well by then
            faults[family] = f"{described(point)}: {_line(error)}"
    return facts, faults


def _checked(given: Any) -> Facts:
    if not isinstance(given, Mapping):
        raise TypeError(f"returned {type(given).__name__}; right form: a mapping of names to numbers or text")
    for key, value in given.items():
        if not isinstance(key, str) or not re.fullmatch(KEY, key):
            raise TypeError(f"{key!r} is no name of a fact; right form: names with dots between them")
        if not isinstance(value, int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
            raise TypeError(f"{key} is {str(value)[:60]!r} ({type(value).__name__}); right form: a finite number or text")
    return dict(given)


def _line(error: Exception) -> str:
    """Type, first line of the text, and the innermost place."""
    inner = error.__traceback__
    while inner is not None and inner.tb_next is not None:
        inner = inner.tb_next
    place = f" ({Path(inner.tb_frame.f_code.co_filename).name}:{inner.tb_lineno})" if inner else ""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}{place}"
