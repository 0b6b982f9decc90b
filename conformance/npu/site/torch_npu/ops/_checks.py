"""What every operator needs: the two ways to say no, and the dtype to compute in."""

from typing import Any, NoReturn

import torch
from torch import Tensor


def refuse(op: str, argument: str, value: Any) -> NoReturn:
    """Raise NotImplementedError: hardware may take this value, the emulation does not."""
    raise NotImplementedError(f"emulated {op} does not support {argument}={value!r}")


def only_defaults(op: str, **arguments: Any) -> None:
    """Refuse every argument that is given (neither None nor, for strings, empty)."""
    for name, value in arguments.items():
        if value is not None and value != "":
            refuse(op, name, "a tensor" if isinstance(value, Tensor) else value)


def require(condition: bool, op: str, sentence: str) -> None:
    """Raise RuntimeError for an input that the vendor's documentation forbids."""
    if not condition:
        raise RuntimeError(f"{op}: {sentence}")


def floating(op: str, **tensors: Tensor) -> None:
    """Raise RuntimeError for a tensor that does not hold floating-point numbers."""
    for name, tensor in tensors.items():
        require(tensor.is_floating_point(), op, f"{name} must be floating-point, got {tensor.dtype}.")


def same_shape(op: str, one: str, other: str, **tensors: Tensor) -> None:
    """Raise RuntimeError unless the two named tensors have one shape."""
    a, b = tensors[one].shape, tensors[other].shape
    require(a == b, op, f"{one} {tuple(a)} and {other} {tuple(b)} must have one shape.")


def wide(tensor: Tensor) -> Tensor:
    """`tensor` in the dtype that kernels compute in: float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)
