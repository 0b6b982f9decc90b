"""Streams and events. Stand for the NPU's queues: here a call has finished when it returns, so there is nothing to wait for."""
# ruff: noqa: ARG001, ARG002 - the signatures are the real ones

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch


class Event:
    """`record` takes the wall clock; `elapsed_time` is the difference in milliseconds."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing
        self._recorded: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Marks now."""
        self._recorded = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """What was recorded has happened."""

    def synchronize(self) -> None:
        """What was recorded has happened."""

    def query(self) -> bool:
        """True: what was recorded has happened."""
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to `end_event`; RuntimeError unless both were recorded with enable_timing."""
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded is None or end_event._recorded is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded - self._recorded) * 1000


class Stream:
    """An identity only; equal to itself alone."""

    _made = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        Stream._made += 1
        self.npu_stream = Stream._made
        self.stream_id = self.npu_stream
        self.priority = priority
        self.device = torch.device("npu", 0)
        self.device_index = 0
        self.device_type = "npu"

    def wait_event(self, event: Event) -> None:
        """What was recorded has happened."""

    def wait_stream(self, stream: Stream) -> None:
        """The other stream is idle."""

    def record_event(self, event: Event | None = None) -> Event:
        """`event`, or a new one, recorded now."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Idle."""

    def query(self) -> bool:
        """True: idle."""
        return True

    def __enter__(self) -> Stream:
        self._outer = current_stream()
        set_stream(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        set_stream(self._outer)


_default = Stream()
_current = _default


def current_stream(device: Any = None) -> Stream:
    """The stream of the innermost StreamContext, else the default one."""
    return _current


def default_stream(device: Any = None) -> Stream:
    """The same object in every call."""
    return _default


def set_stream(stream: Stream | None) -> None:
    """Makes `stream` current; None does nothing."""
    global _current
    _current = _current if stream is None else stream


class StreamContext:
    """Makes a stream current inside the block; with None it does nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self._outer = current_stream()
        set_stream(self.stream)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        set_stream(self._outer)


def stream(stream: Stream | None) -> StreamContext:
    """`with torch.npu.stream(s):`"""
    return StreamContext(stream)
