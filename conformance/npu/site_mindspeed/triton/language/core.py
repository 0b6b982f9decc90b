"""triton.language.core: types, so that isinstance and annotations work."""
# ruff: noqa: ARG001 - the signatures are the real ones

from __future__ import annotations

from typing import Any, NoReturn

from .._strict import refuse_unknown

__getattr__ = refuse_unknown("triton.language.core")


class constexpr:
    """A compile-time constant; usable as an annotation, and converts to bool."""

    def __init__(self, value: Any) -> None:
        self.value: Any = value.value if isinstance(value, constexpr) else value

    def __bool__(self) -> bool:
        return bool(self.value)


class dtype:
    """A type of tensor elements."""

    def __init__(self, name: str) -> None:
        self.name = name


int1, int8, int16, int32, int64 = (dtype(f"int{bits}") for bits in (1, 8, 16, 32, 64))
uint8, uint16, uint32, uint64 = (dtype(f"uint{bits}") for bits in (8, 16, 32, 64))
float16, bfloat16, float32, float64 = dtype("fp16"), dtype("bf16"), dtype("fp32"), dtype("fp64")


class tensor:
    """A block of elements inside a kernel."""


def view(input: Any, shape: Any, _semantic: Any = None) -> NoReturn:
    """torch looks at the signature only."""
    raise RuntimeError("triton kernels do not run on the emulated NPU")


def make_tensor_descriptor(*args: Any, **kwargs: Any) -> NoReturn:
    """MindSpeed looks for the name only."""
    raise RuntimeError("triton kernels do not run on the emulated NPU")
