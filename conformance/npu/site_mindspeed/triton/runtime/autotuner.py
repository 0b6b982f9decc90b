"""triton.runtime.autotuner: decorators that keep the kernel and forget the tuning."""
# ruff: noqa: ARG001, ARG002 - the signatures are the real ones

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._strict import refuse_unknown
from .jit import KernelInterface

__getattr__ = refuse_unknown("triton.runtime.autotuner")


class Config:
    """One choice of meta-parameters."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 2, **options: Any) -> None:
        self.kwargs = kwargs
        self.num_warps = num_warps
        self.num_stages = num_stages


class OutOfResources(Exception):
    """A kernel too large for the device; never raised here."""


class Autotuner(KernelInterface):
    """A kernel with choices."""

    def __init__(self, fn: Any, configs: list[Config], key: list[str]) -> None:
        self.fn = fn
        self.configs = configs
        self.keys = key


class Heuristics(KernelInterface):
    """A kernel with computed meta-parameters."""

    def __init__(self, fn: Any, values: dict[str, Any]) -> None:
        self.fn = fn
        self.values = values


def autotune(configs: list[Config], key: list[str], **options: Any) -> Callable[[Any], Autotuner]:
    """Any key is accepted; real triton refuses keys that the kernel lacks, some of which MindSpeed gives."""
    return lambda fn: Autotuner(fn, configs, key)


def heuristics(values: dict[str, Any]) -> Callable[[Any], Heuristics]:
    """The values would be computed at launch."""
    return lambda fn: Heuristics(fn, values)
