"""torch_npu.profiler: the names that verl and MindSpeed import. Making a profile raises: there is nothing to measure."""
# ruff: noqa: ARG001, ARG002 - the signatures are the real ones

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NoReturn

from .._strict import not_emulated, refuse_unknown

__getattr__ = refuse_unknown("torch_npu.profiler")


class ProfilerActivity(enum.Enum):
    """What to profile."""

    CPU = 0
    NPU = 1


class ProfilerLevel(enum.Enum):
    """How much to profile."""

    Level_none = "Level_none"
    Level0 = "Level0"
    Level1 = "Level1"
    Level2 = "Level2"


class AiCMetrics(enum.Enum):
    """Counters of the AI cores."""

    AiCoreNone = "AiCoreNone"
    PipeUtilization = "PipeUtilization"


class ExportType(enum.Enum):
    """Format of the result."""

    Text = "text"
    Db = "db"


class profile:
    """Stands for CANN's profiler; raises when made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise not_emulated("torch_npu.profiler.profile")


class _ExperimentalConfig:
    """Stands for the profiler's detailed settings; raises when made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise not_emulated("torch_npu.profiler._ExperimentalConfig")


def schedule(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: belongs to a profile."""
    raise not_emulated("torch_npu.profiler.schedule")


def tensorboard_trace_handler(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Raises: belongs to a profile."""
    raise not_emulated("torch_npu.profiler.tensorboard_trace_handler")
