"""npu_scaled_masked_softmax and its backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import require, wide
from ._registry import Arguments, Derivative, differentiable, kernel

MASKED = -10000.0  # what the kernel writes over a masked logit


def _forbidden(op: str, x: Tensor, mask: Tensor, fixed_triu_mask: bool) -> Tensor:
    require(x.dim() == 4, op, f"x must have 4 dimensions, got {x.dim()}.")
    rows, columns = x.shape[-2:]
    require(
        all(32 <= n <= 4096 and n % 32 == 0 for n in (rows, columns)),
        op,
        f"the last two dimensions must be multiples of 32 from 32 to 4096, got {rows} x {columns}.",
    )
    if fixed_triu_mask:
        return torch.ones(rows, columns, dtype=torch.bool).triu(1)
    require(mask.dtype == torch.bool, op, f"mask must be bool, got {mask.dtype}.")
    require(
        mask.dim() == 4 and all(m in (1, n) for m, n in zip(mask.shape, x.shape, strict=True)),
        op,
        f"mask {tuple(mask.shape)} must broadcast to x {tuple(x.shape)}.",
    )
    return mask


@kernel("npu_scaled_masked_softmax")
def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False) -> Tensor:
    """Softmax of scale * x over the last dimension; mask True hides. `fixed_triu_mask` ignores `mask`: causal."""
    forbidden = _forbidden("npu_scaled_masked_softmax", x, mask, fixed_triu_mask)
    return torch.softmax((wide(x) * scale).masked_fill(forbidden, MASKED), -1).to(x.dtype)


@kernel("npu_scaled_masked_softmax_backward")
def scaled_masked_softmax_backward(y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool) -> Tensor:
    """Gradient of x; zero where masked."""
    forbidden = _forbidden("npu_scaled_masked_softmax_backward", y, mask, fixed_triu_mask)
    grad, out = wide(y_grad), wide(y)
    dx = (grad - (grad * out).sum(-1, keepdim=True)) * out * scale
    return dx.masked_fill(forbidden, 0.0).to(y.dtype)


def _backward(call: Arguments, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor]:
    return (
        torch.ops.npu.npu_scaled_masked_softmax_backward(
            grads[0], outputs[0], call["mask"], call["scale"], call["fixed_triu_mask"]
        ),
    )


differentiable(Derivative("npu_scaled_masked_softmax", ("x",), _backward))
