"""Allocation, dtype and storage-format operators."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import only_defaults, refuse
from ._registry import Arguments, Derivative, differentiable, kernel

# c10::ScalarType's numbers, by which npu_dtype_cast takes its target (a torch.dtype argument arrives as its number).
_DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
}
# aclFormat's numbers for plain row-major storage: ND, NCHW (4-D) and NCDHW (5-D).
_ND, _NCHW, _NCDHW = 2, 0, 30


@kernel("empty_with_swapped_memory", "CompositeImplicitAutograd")
def empty_with_swapped_memory(
    size: list[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,  # noqa: ARG001 - there is one memory here
) -> Tensor:
    """Uninitialised tensor; on hardware it lies in host memory that the device can address."""
    return torch.empty(size, dtype=dtype)


@kernel("npu_dtype_cast")
def dtype_cast(input: Tensor, dtype: int, input_dtype: int | None = None) -> Tensor:
    """`input` as `dtype` (a c10::ScalarType number)."""
    only_defaults("npu_dtype_cast", input_dtype=input_dtype)
    if dtype not in _DTYPES:
        refuse("npu_dtype_cast", "dtype", dtype)
    return input.to(_DTYPES[dtype], copy=True)


@kernel("npu_dtype_cast_backward")
def dtype_cast_backward(
    grad: Tensor, dtype: torch.dtype, grad_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    """`grad` as `dtype`, the dtype of the forward's input."""
    only_defaults("npu_dtype_cast_backward", grad_dtype=grad_dtype, input_dtype=input_dtype)
    return grad.to(dtype, copy=True)


def _cast_backward(call: Arguments, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor]:  # noqa: ARG001
    return (torch.ops.npu.npu_dtype_cast_backward(grads[0], call["input"].dtype),)


def plain_format(dimensions: int) -> int:
    """aclFormat number of a tensor with so many dimensions that was never cast."""
    return {4: _NCHW, 5: _NCDHW}.get(dimensions, _ND)


@kernel("get_npu_format")
def get_npu_format(input: Tensor) -> int:
    """aclFormat number of `input`. Only plain storage exists here."""
    return plain_format(input.dim())


@kernel("npu_format_cast")
def format_cast(input: Tensor, acl_format: int, *, customize_dtype: int | None = None, input_dtype: int | None = None) -> Tensor:
    """A copy of `input`. Only casts to the format it already has are known; private ones (29, FRACTAL_NZ) are not."""
    only_defaults("npu_format_cast", customize_dtype=customize_dtype, input_dtype=input_dtype)
    if acl_format not in (_ND, plain_format(input.dim())):
        refuse("npu_format_cast", "acl_format", acl_format)
    return input.clone()


def _format_backward(call: Arguments, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor]:  # noqa: ARG001
    return (grads[0],)


differentiable(Derivative("npu_dtype_cast", ("input",), _cast_backward))
differentiable(Derivative("npu_format_cast", ("input",), _format_backward))
