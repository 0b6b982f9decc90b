"""torch_npu.npu.mstx: stands for the markers that CANN's profiler reads. Nothing profiles."""
# ruff: noqa: ARG004 - the signatures are the real ones

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any


class mstx:
    """Static functions only."""

    _ids = itertools.count(1)

    @staticmethod
    def mark(message: str, stream: Any = None, domain: str = "default") -> None:
        """No profiler to mark for."""

    @staticmethod
    def range_start(message: str, stream: Any = None, domain: str = "default") -> int:
        """A fresh id."""
        return next(mstx._ids)

    @staticmethod
    def range_end(range_id: int, domain: str = "default") -> None:
        """No profiler to tell."""

    @staticmethod
    def mstx_range(
        message: str, stream: Any = None, domain: str = "default"
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator that brackets a function by range_start and range_end."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def inner(*args: Any, **kwargs: Any) -> Any:
                range_id = mstx.range_start(message, stream, domain)
                try:
                    return function(*args, **kwargs)
                finally:
                    mstx.range_end(range_id, domain)

            return inner

        return decorate
