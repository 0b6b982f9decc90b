"""npu_swiglu and its backward."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import floating, require, wide
from ._registry import Arguments, Derivative, differentiable, kernel


def _halves(input: Tensor, dim: int, op: str) -> tuple[Tensor, Tensor]:
    require(
        -input.dim() <= dim < input.dim() and input.shape[dim] % 2 == 0,
        op,
        f"dimension {dim} of {tuple(input.shape)} must be even.",
    )
    floating(op, input=input)
    gate, linear = wide(input).chunk(2, dim)
    return gate, linear


@kernel("npu_swiglu")
def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half along `dim`, which must be even."""
    gate, linear = _halves(input, dim, "npu_swiglu")
    return (torch.nn.functional.silu(gate) * linear).to(input.dtype)


@kernel("npu_swiglu_backward")
def swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """Gradient of input."""
    op = "npu_swiglu_backward"
    gate, linear = _halves(input, dim, op)
    require(grad_output.shape == gate.shape, op, f"grad_output must have the output's shape {tuple(gate.shape)}.")
    grad, sigmoid = wide(grad_output), torch.sigmoid(gate)
    dgate = grad * linear * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((dgate, grad * gate * sigmoid), dim).to(input.dtype)


def _backward(call: Arguments, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor]:  # noqa: ARG001
    return (torch.ops.npu.npu_swiglu_backward(grads[0], call["input"], call["dim"]),)


differentiable(Derivative("npu_swiglu", ("input",), _backward))
