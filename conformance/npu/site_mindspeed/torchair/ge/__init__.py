"""torchair.ge: the types that converters have in their annotations. Building a graph raises."""

from __future__ import annotations

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"module 'torchair.ge' has no attribute {name!r}: it only stands in for torchair on the emulated NPU")


class Tensor:
    """A tensor in a graph."""


class TensorSpec:
    """Shape and type of a tensor in a graph."""


class DataType:
    """Element types of a graph; only converters, which never run, name one."""
