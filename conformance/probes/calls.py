"""How often named Python functions ran, by sys.setprofile: no function is wrapped or replaced.

A profile function holds for one thread. The backward pass of tensors on a device runs in threads of autograd's own, which no
Python code starts; `watch_thread`, called from within such a thread, covers it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from types import CodeType, FrameType, TracebackType
from typing import Any

from conformance.probes import Facts


class CallCounter:
    """Counts calls of `module:qualified.name` targets in the entering thread and in every thread that calls `watch_thread`.

    The function that the module holds on entry is looked up through wrappers (`__wrapped__`), as MindSpeed's patches set it.
    A target that does not exist counts 0: on some stacks a name is simply not there.
    """

    def __init__(self, targets: Iterable[str]) -> None:
        self._targets = tuple(targets)
        self._names: dict[CodeType, str] = {}
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._is_entered = False

    def __enter__(self) -> CallCounter:
        for target in self._targets:
            code = _code_of(target)
            if code is not None:
                self._names[code] = target
        if self._names:
            self._is_entered = True
            sys.setprofile(self._on_event)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._names:
            self._is_entered = False
            sys.setprofile(None)

    def watch_thread(self) -> None:
        """Count in the calling thread from now on; a call that is under way there counts as well. Cheap to call again."""
        if not self._is_entered or sys.getprofile() is not None:
            return
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            self._count(frame)
            frame = frame.f_back
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _arg: Any) -> None:
        if not self._is_entered:
            sys.setprofile(None)  # no thread can do this for another: each does it when it next runs Python code
        elif event == "call":
            self._count(frame)

    def _count(self, frame: FrameType) -> None:
        name = self._names.get(frame.f_code)
        if name is not None:
            with self._lock:
                self.counts[name] += 1

    def facts(self) -> Facts:
        return {f"calls.{target}": self.counts[target] for target in self._targets}


def _code_of(target: str) -> CodeType | None:
    module_name, _, path = target.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for attribute in path.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError):
        return None
    # All functions that one decorator wraps share the wrapper's code object: it would count them all.
    code = getattr(inspect.unwrap(value), "__code__", None)
    return code if isinstance(code, CodeType) else None
