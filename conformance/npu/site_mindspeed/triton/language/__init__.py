"""triton.language: what kernels name in their signatures and decorators. Their bodies never run."""

from __future__ import annotations

from .._strict import refuse_unknown
from . import core, extra, math
from .core import (
    bfloat16,
    constexpr,
    dtype,
    float16,
    float32,
    float64,
    int1,
    int8,
    int16,
    int32,
    int64,
    make_tensor_descriptor,
    tensor,
    uint8,
    uint16,
    uint32,
    uint64,
)
from .math import exp, log, log2

__all__ = [
    "bfloat16",
    "constexpr",
    "core",
    "dtype",
    "exp",
    "extra",
    "float16",
    "float32",
    "float64",
    "int1",
    "int8",
    "int16",
    "int32",
    "int64",
    "log",
    "log2",
    "make_tensor_descriptor",
    "math",
    "tensor",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]

__getattr__ = refuse_unknown("triton.language")
