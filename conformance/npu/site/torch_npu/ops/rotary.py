"""npu_rotary_mul and its backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import floating, only_defaults, refuse, require, same_shape, wide
from ._registry import Arguments, Derivative, differentiable, kernel

_TOO_WIDE = 896  # for a head
#: Dimensions in which the tables may have size 1: one for all heads; for `half` also one for each batch member, or full ones.
#: From the layouts BNSD, BSND and SBND, which the operator is not told.
_SHARED = ((0, 1), (0, 2), (1, 2))
_TABLES = {"half": (*_SHARED, (1,), (2,), ()), "interleave": _SHARED}


def _rotate(x: Tensor, mode: str) -> Tensor:
    """Quarter turn of each pair: halves for "half" (GPT-NeoX), neighbours for "interleave" (GPT-J)."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _check(op: str, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> None:
    if rotary_mode not in ("half", "interleave"):
        refuse(op, "rotary_mode", rotary_mode)
    require(input.dim() == r1.dim() == r2.dim() == 4, op, "input, r1 and r2 must have 4 dimensions.")
    dtypes = input.dtype, r1.dtype, r2.dtype
    require(len(set(dtypes)) == 1, op, f"input, r1 and r2 must have one dtype, got {', '.join(map(str, dtypes))}.")
    floating(op, input=input)
    width = input.shape[-1]
    require(width % 2 == 0 and width < _TOO_WIDE, op, f"the last dimension must be even and below {_TOO_WIDE}, got {width}.")
    require(r1.shape == r2.shape, op, f"r1 {tuple(r1.shape)} and r2 {tuple(r2.shape)} must have one shape.")
    require(
        r1.shape[-1] == input.shape[-1] and all(r in (1, n) for r, n in zip(r1.shape, input.shape, strict=True)),
        op,
        f"r1 {tuple(r1.shape)} must broadcast to input {tuple(input.shape)} with the same last dimension.",
    )
    forms = [tuple(1 if i in ones else n for i, n in enumerate(input.shape)) for ones in _TABLES[rotary_mode]]
    require(tuple(r1.shape) in forms, op, f"r1 {tuple(r1.shape)} is none of {rotary_mode}'s forms {sorted(set(forms))}.")


@kernel("npu_rotary_mul")
def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None) -> Tensor:
    """input * r1 + rotated(input) * r2, all 4-D; r1 (cosines) and r2 (sines) broadcast."""
    only_defaults("npu_rotary_mul", rotate=rotate)
    _check("npu_rotary_mul", input, r1, r2, rotary_mode)
    x = wide(input)
    return (x * wide(r1) + _rotate(x, rotary_mode) * wide(r2)).to(input.dtype)


@kernel("npu_rotary_mul_backward")
def rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, r1 and r2."""
    _check("npu_rotary_mul_backward", input, r1, r2, rotary_mode)
    same_shape("npu_rotary_mul_backward", "grad", "input", grad=grad, input=input)
    g, x = wide(grad), wide(input)
    # The transpose of a quarter turn is the turn back, that is its negative.
    dx = g * wide(r1) - _rotate(g * wide(r2), rotary_mode)
    dr1 = (g * x).sum_to_size(r1.shape)
    dr2 = (g * _rotate(x, rotary_mode)).sum_to_size(r2.shape)
    return dx.to(input.dtype), dr1.to(r1.dtype), dr2.to(r2.dtype)


def _backward(call: Arguments, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:  # noqa: ARG001
    result: Sequence[Tensor] = torch.ops.npu.npu_rotary_mul_backward(
        grads[0], call["input"], call["r1"], call["r2"], call["rotary_mode"]
    )
    return result


differentiable(Derivative("npu_rotary_mul", ("input", "r1", "r2"), _backward))
