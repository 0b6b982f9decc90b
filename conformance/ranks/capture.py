"""Turning what happened in a process into text that outlives it."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path
from types import TracebackType

from conformance.ranks.records import Frame, Raised

_HERE = Path(__file__).parent


def capture(error: BaseException) -> Raised:
    """`error` with its frames, text and causes. The frames of this package around the target are left out."""
    return _capture(error, set())


def _capture(error: BaseException, seen: set[int]) -> Raised:
    seen.add(id(error))
    start = _outside(error.__traceback__)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return Raised(
        type=qualified_name(type(error)),
        message=_message(error),
        frames=tuple(_frames(start)),
        traceback="".join(traceback.format_exception(type(error), error, start)),
        cause=_capture(cause, seen) if cause is not None and id(cause) not in seen else None,
    )


def qualified_name(kind: type) -> str:
    """`hydra.errors.ConfigCompositionException`, but plain `TypeError`."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def tail(path: Path, limit: int) -> str:
    """The last `limit` bytes of a file as text; "" if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            return file.read(limit).decode(errors="replace")
    except FileNotFoundError:
        return ""


def _outside(start: TracebackType | None) -> TracebackType | None:
    inner = start
    while inner is not None and Path(inner.tb_frame.f_code.co_filename).parent == _HERE:
        inner = inner.tb_next
    return inner or start


def _frames(step: TracebackType | None) -> list[Frame]:
    frames = []
    while step is not None:
        code, line = step.tb_frame.f_code, step.tb_lineno
        # f_globals lets linecache find source that a loader holds (zip files).
        source = linecache.getline(code.co_filename, line, step.tb_frame.f_globals).strip()
        frames.append(Frame(code.co_filename, line, code.co_name, source))
        step = step.tb_next
    return frames


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception class whose __str__ raises must not hide the exception
        return "<str() of this exception failed>"
