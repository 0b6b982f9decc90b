"""Was a key read at all? Reads of MindSpeed's argument store and of the transformer config, by name and reader.

A key that is set, stored and never read has no effect, whatever the documentation says. Only reads from the stack's own
code count, and only reads that ask for the key by name: copying, printing and dataclass plumbing go through every field
and mean nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from types import FrameType
from typing import Any

from conformance.probes import Facts

READERS = ("megatron.", "mindspeed.", "verl.", "mbridge.")


class ReadTrace:
    """Counts attribute reads of the named keys on the objects and classes it is attached to."""

    def __init__(self, keys: Iterable[str]) -> None:
        #: May grow until the first `attach_`.
        self.keys = frozenset(keys)
        self.reads: Counter[tuple[str, str]] = Counter()

    def attach_class(self, cls: type) -> None:
        """Observe every instance of `cls`, present and future, subclasses included. Values are passed through untouched."""
        if not self.keys:
            return
        original: Any = cls.__getattribute__
        note, keys = self._note, self.keys

        def observed(instance: Any, name: str) -> Any:
            if name in keys:
                note(name)
            return original(instance, name)

        cls.__getattribute__ = observed  # type: ignore[assignment,method-assign]

    def attach_instance(self, instance: Any) -> None:
        """Observe one object by giving it an observing subclass of its own class."""
        cls = type(instance)
        twin = type(cls.__name__, (cls,), {"__module__": cls.__module__})
        self.attach_class(twin)
        instance.__class__ = twin

    def _note(self, name: str) -> None:
        frame = sys._getframe(2)
        if frame.f_code.co_filename == "<string>":  # a generated dataclass method, such as __repr__ or __eq__
            return
        reader = str(frame.f_globals.get("__name__", ""))
        if reader.startswith(READERS) and _asks_for(frame, name):
            self.reads[(name, f"{reader}:{frame.f_code.co_qualname}")] += 1

    def facts(self) -> Facts:
        """`reads.<key>`: how many reads; 0 for a key that nobody read."""
        facts: Facts = {f"reads.{key}": 0 for key in sorted(self.keys)}
        for (key, _reader), count in self.reads.items():
            facts[f"reads.{key}"] = float(facts[f"reads.{key}"]) + count
        return facts

    def readers(self) -> dict[str, list[str]]:
        """key -> the functions that read it."""
        found: dict[str, list[str]] = {}
        for key, reader in sorted(self.reads):
            found.setdefault(key, []).append(reader)
        return found


def _asks_for(frame: FrameType, name: str) -> bool:
    """Whether the reading code names the key: in its text, or as an attribute of its object (a feature has its key's name)."""
    code = frame.f_code
    if name in code.co_names or name in code.co_consts:
        return True
    return name in [v for v in getattr(frame.f_locals.get("self"), "__dict__", {}).values() if isinstance(v, str)]
