"""torchair: graph mode of torch_npu. Stands for the package of that name in Ascend's repositories.

MindSpeed's operator builders import it and register converters from FX nodes to graph-engine nodes. Graph mode is never
entered, so converters are taken and dropped.
"""
# ruff: noqa: ARG001 - the signatures are the real ones

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from . import ge

__all__ = ["ge", "register_fx_node_ge_converter"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"module 'torchair' has no attribute {name!r}: it only stands in for torchair on the emulated NPU")


def register_fx_node_ge_converter(aten_op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that returns the converter unchanged."""
    return lambda converter: converter
