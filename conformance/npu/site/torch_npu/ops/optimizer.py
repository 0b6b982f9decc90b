"""npu_apply_adam_w: one AdamW step with the powers of beta given."""

import math
from typing import Any

import torch
from torch import Tensor

from ._checks import floating, require, wide
from ._registry import kernel


def adamw_step(
    param: Tensor,
    grad: Tensor,
    moment: Tensor,
    square: Tensor,
    square_max: Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    powers: tuple[float, float],
    weight_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """One step of AdamW (torch.optim.AdamW's formula), in place. `powers` are beta**t after this step.

    `square_max` is AMSGrad's running maximum of `square`, or None without AMSGrad. Computes in float32 (float64 for
    float64) whatever the dtypes of the states.
    """
    g = -wide(grad) if maximize else wide(grad)
    p = wide(param) * (1 - lr * weight_decay)
    m = wide(moment) * betas[0] + g * (1 - betas[0])
    v = wide(square) * betas[1] + g * g * (1 - betas[1])
    moment.copy_(m)
    square.copy_(v)
    if square_max is not None:
        v = torch.maximum(wide(square_max), v)
        square_max.copy_(v)
    denominator = v.sqrt() / math.sqrt(1 - powers[1]) + eps
    param.copy_(p - (lr / (1 - powers[0])) * m / denominator)


@kernel("npu_apply_adam_w")
def apply_adam_w(*_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Declared but not implemented by the vendor either; the message is the vendor's."""
    raise RuntimeError("npu_apply_adam_w is not implemented for Tensor")


@kernel("npu_apply_adam_w.out")
def apply_adam_w_out(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    out: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Update out = (parameter, first moment, second moment) in place and return them.

    `beta1_power` and `beta2_power` are beta**(t-1): the operator multiplies by beta once more (so CANN's
    documentation of ApplyAdamW).
    """
    op = "npu_apply_adam_w"
    require(len(out) == 3, op, f"out takes parameter, first and second moment, got {len(out)} tensors.")
    param, moment, square = out
    require(not amsgrad or max_grad_norm is not None, op, "amsgrad needs max_grad_norm.")
    shapes = [tuple(t.shape) for t in (grad, *out)]
    require(len(set(shapes)) == 1, op, f"grad and out must have one shape, got {shapes}.")
    floating(op, out=param)
    dtypes = [t.dtype for t in (grad, *out)]
    require(len(set(dtypes)) == 1, op, f"grad and out must have one dtype, got {dtypes}.")
    if amsgrad and max_grad_norm is not None:
        largest = tuple(max_grad_norm.shape), max_grad_norm.dtype
        require(largest == (shapes[0], dtypes[0]), op, f"max_grad_norm must be as grad, got {largest}.")
    adamw_step(
        param,
        grad,
        moment,
        square,
        max_grad_norm if amsgrad else None,
        lr=lr,
        betas=(beta1, beta2),
        powers=(beta1_power * beta1, beta2_power * beta2),
        weight_decay=weight_decay,
        eps=epsilon,
        maximize=bool(maximize),
    )
    return param, moment, square
