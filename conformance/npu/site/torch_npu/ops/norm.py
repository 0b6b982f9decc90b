"""npu_rms_norm and its backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import floating, require, same_shape, wide
from ._registry import Arguments, Derivative, differentiable, kernel


def _trailing(gamma: Tensor) -> tuple[int, ...]:
    return tuple(range(-gamma.dim(), 0))


@kernel("npu_rms_norm")
def rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Root-mean-square norm over the trailing dimensions that `gamma` spans.

    Returns (output as input, reciprocal root mean square, float32, input's shape with 1 in the normed dimensions).
    """
    op = "npu_rms_norm"
    floating(op, input=input, gamma=gamma)
    require(input.dtype == gamma.dtype, op, f"gamma must have input's dtype {input.dtype}, got {gamma.dtype}.")
    require(
        0 < gamma.dim() <= input.dim() and input.shape[-gamma.dim() :] == gamma.shape,
        op,
        f"gamma's shape {tuple(gamma.shape)} must equal input's last dimensions, input is {tuple(input.shape)}.",
    )
    x = wide(input)
    rstd = torch.rsqrt(x.pow(2).mean(_trailing(gamma), keepdim=True) + epsilon)
    return (x * rstd * wide(gamma)).to(input.dtype), rstd


@kernel("npu_rms_norm_backward")
def rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of input (its dtype) and of gamma (float32, or float64 for float64)."""
    op = "npu_rms_norm_backward"
    same_shape(op, "dy", "input", dy=dy, input=input)
    reduced = (*input.shape[: input.dim() - gamma.dim()], *(1 for _ in gamma.shape))
    require(rstd.shape == reduced, op, f"rstd must have shape {reduced}, got {tuple(rstd.shape)}.")
    normed, grad = wide(input) * rstd, wide(dy)
    scaled = grad * wide(gamma)
    dx = rstd * (scaled - normed * (scaled * normed).mean(_trailing(gamma), keepdim=True))
    dgamma = (grad * normed).reshape(-1, *gamma.shape).sum(0)
    return dx.to(input.dtype), dgamma


def _backward(call: Arguments, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(grads[0], call["input"], call["gamma"], outputs[1])
    return dx, dgamma


differentiable(Derivative("npu_rms_norm", ("input", "gamma"), _backward))
