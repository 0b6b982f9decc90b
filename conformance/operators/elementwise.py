"""RMS norm, SwiGLU, rotary embedding and fused AdamW: cases, the truth, and what must hold beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from conformance.operators.gradients import Names, check_dtypes, compare
from conformance.operators.surface import Drawn, Dtype, Strides, Surface, draw, dtype_of, lay_out, normal
from conformance.operators.tolerance import Quantity, Wrong, exact


@dataclass(frozen=True)
class RmsNormCase:
    """`gamma_dims` trailing dimensions of `shape` are normed. `others`: gamma's memory, `incoming`: the gradient's."""

    shape: tuple[int, ...]
    gamma_dims: int
    dtype: Dtype
    epsilon: float = 1e-6
    size: float = 1.0
    strides: Strides = "contiguous"
    others: Strides = "contiguous"
    incoming: Strides = "contiguous"
    zero_row: bool = False
    seed: int = 0


def rms_norm(epsilon: float) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """Plain RMS norm: output and reciprocal root mean square."""

    def call(x: Tensor, gamma: Tensor) -> list[Tensor]:
        normed = tuple(range(x.dim() - gamma.dim(), x.dim()))
        rstd = 1 / torch.sqrt((x * x).mean(normed, keepdim=True) + epsilon)
        return [x * rstd * gamma, rstd]

    return call


def check_rms_norm(case: RmsNormCase, surface: Surface) -> list[Quantity]:
    """Values, gradients, and the scale law: twice the input with four times epsilon gives the same output."""
    x = draw(surface, case.shape, case.dtype, case.strides, case.seed, case.size)
    if case.zero_row and x.cpu.numel() and case.strides != "expanded":
        x.cpu[0] = 0
        x.device[0] = 0
    gamma = draw(surface, case.shape[-case.gamma_dims :], case.dtype, case.others, case.seed + 1)
    normed, lead = tuple(range(-case.gamma_dims, 0)), len(case.shape) - case.gamma_dims
    a, g = x.cpu.double(), gamma.cpu.double()
    rstd = 1 / torch.sqrt(a.pow(2).mean(normed, keepdim=True) + case.epsilon)
    n, scaled = (a * rstd).abs(), g.abs() * 4  # random gradients rarely exceed 4
    sizes = {
        "gradient of input": rstd * (scaled + n * (scaled * n).mean(normed, keepdim=True)),
        "gradient of gamma": (4 * n).sum(tuple(range(lead))) if lead else 4 * n,
    }
    width, rows = gamma.cpu.numel(), max(1, a.numel() // max(gamma.cpu.numel(), 1))
    quantities = compare(
        lambda *t: torch.ops.npu.npu_rms_norm(*t, epsilon=case.epsilon),
        rms_norm(case.epsilon),
        [x, gamma],
        Names(("input", "gamma"), ("output", "rstd"), float32=("rstd",)),
        seed=case.seed,
        incoming=case.incoming,
        magnitudes=sizes,
        terms={"output": width, "rstd": width, "gradient of input": width, "gradient of gamma": rows},
    )
    _, given = torch.ops.npu.npu_rms_norm(x.device, gamma.device, epsilon=case.epsilon)
    back = torch.ops.npu.npu_rms_norm_backward(torch.ones_like(x.device), x.device, gamma.device, given)
    check_dtypes(("input", "gamma"), back, (x.cpu.dtype, torch.float32))  # gamma's is float32 whatever the input's
    twice = torch.ops.npu.npu_rms_norm(x.device.detach() * 2, gamma.device, epsilon=case.epsilon * 4)
    law = quantities[0]
    quantities.append(Quantity("output of twice the input", twice[0].cpu(), law.truth, law.plain, law.dtype, None, width))
    return quantities


@dataclass(frozen=True)
class SwigluCase:
    """`dim` is even."""

    shape: tuple[int, ...]
    dim: int
    dtype: Dtype
    size: float = 1.0
    strides: Strides = "contiguous"
    incoming: Strides = "contiguous"
    seed: int = 0


def swiglu(dim: int) -> Callable[[Tensor], list[Tensor]]:
    """x1 / (1 + exp(-x1)) * x2 of the halves along `dim`."""

    def call(x: Tensor) -> list[Tensor]:
        half = x.shape[dim] // 2
        gate, linear = x.narrow(dim, 0, half), x.narrow(dim, half, half)
        return [gate * torch.sigmoid(gate) * linear]

    return call


def check_swiglu(case: SwigluCase, surface: Surface) -> list[Quantity]:
    """Values and gradients."""
    x = draw(surface, case.shape, case.dtype, case.strides, case.seed, case.size)
    largest = max(1.0, float(x.cpu.double().abs().max())) if x.cpu.numel() else 1.0
    quantities = compare(
        lambda t: [torch.ops.npu.npu_swiglu(t, dim=case.dim)],
        swiglu(case.dim),
        [x],
        Names(("input",), ("output",)),
        seed=case.seed,
        incoming=case.incoming,
        magnitudes={"gradient of input": torch.tensor(4 * largest, dtype=torch.float64)},
    )
    sent = surface.put(torch.ones(quantities[0].truth.shape, dtype=x.cpu.dtype))
    check_dtypes(("input",), [torch.ops.npu.npu_swiglu_backward(sent, x.device, case.dim)], [x.cpu.dtype])
    return quantities


@dataclass(frozen=True)
class RotaryCase:
    """`broadcast` are the dimensions (of the first three) in which cosines and sines have size 1.

    `others`: the memory of cosines and sines, `incoming`: that of the output's gradient.
    """

    shape: tuple[int, int, int, int]
    broadcast: tuple[int, ...]
    mode: Literal["half", "interleave"]
    dtype: Dtype
    entry: Literal["operator", "kernel"] = "operator"
    strides: Strides = "contiguous"
    others: Strides = "contiguous"
    incoming: Strides = "contiguous"
    seed: int = 0


def rotary(mode: str) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    """Each entry times its cosine, plus its partner's times the sine, minus for the first of a pair."""

    def call(x: Tensor, r1: Tensor, r2: Tensor) -> list[Tensor]:
        width = x.shape[-1]
        at = torch.arange(width)
        partner = (at + width // 2) % width if mode == "half" else at ^ 1
        first = at < width // 2 if mode == "half" else at % 2 == 0
        sign = torch.where(first, -1.0, 1.0).to(x.dtype)
        return [x * r1 + x[..., partner] * sign * r2]

    return call


def check_rotary(case: RotaryCase, surface: Surface) -> list[Quantity]:
    """Values and gradients; with cosines 1 and sines 0 nothing moves."""

    def operator(x: Tensor, r1: Tensor, r2: Tensor) -> list[Tensor]:
        if case.entry == "kernel":
            kernel = surface.kernels["npu_rotary_position_embedding"]
            return [kernel.npu_rotary_position_embedding(x, r1, r2, 0 if case.mode == "half" else 1)]
        return [torch.ops.npu.npu_rotary_mul(x, r1, r2, case.mode)]

    narrow = [1 if i in case.broadcast else n for i, n in enumerate(case.shape)]
    x = draw(surface, case.shape, case.dtype, case.strides, case.seed)
    tables = [_table(case, narrow, surface, case.seed + i) for i in (1, 2)]
    a, b, c = (t.cpu.double().abs() for t in (x, *tables))
    largest = (b.amax() + c.amax()) if b.numel() else torch.zeros(())
    shared = max(1, a.numel() // max(b.numel(), 1))
    top = a.amax() if a.numel() else torch.zeros(())
    names = Names(("input", "r1", "r2"), ("output",))
    quantities = compare(
        operator,
        rotary(case.mode),
        [x, *tables],
        names,
        seed=case.seed,
        incoming=case.incoming,
        magnitudes={"output": top * largest, "gradient of input": 4 * largest}
        | {f"gradient of {n}": top * shared for n in ("r1", "r2")},
        terms={f"gradient of {n}": shared for n in ("r1", "r2")},
    )
    given = [t.device for t in (x, *tables)]
    if case.entry == "operator":
        back = torch.ops.npu.npu_rotary_mul_backward(torch.ones_like(given[0]), *given, case.mode)
        check_dtypes(names.inputs, back, [x.cpu.dtype] * 3)
    (still,) = operator(given[0], torch.ones_like(given[1]), torch.zeros_like(given[2]))
    exact("output with cosines 1 and sines 0", still.cpu(), x.cpu)
    return quantities


def _table(case: RotaryCase, shape: list[int], surface: Surface, seed: int) -> Drawn:
    """Numbers between -1 and 1, as the operator wants them; each entry by itself, so that a mistaken one shows."""
    values = normal(shape, "float32", seed, 3.0).cos().to(dtype_of(case.dtype))
    if case.others == "expanded":
        values = values[:1].expand(values.shape).contiguous()
    return Drawn(values, lay_out(values, case.others, surface))


@dataclass(frozen=True)
class AdamWCase:
    """`taken` updates, the first of them number `before` + 1. The kernel has no AMSGrad."""

    shape: tuple[int, ...]
    dtype: Dtype
    taken: int = 2
    before: int = 0
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    epsilon: float = 1e-6
    amsgrad: bool = False
    maximize: bool = False
    entry: Literal["operator", "kernel"] = "operator"
    size: float = 1.0
    strides: Literal["contiguous", "sliced", "transposed"] = "contiguous"
    seed: int = 0


def adamw(case: AdamWCase, state: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Decoupled weight decay, as the paper writes it: bias-corrected moments by themselves. Float64 truth and plain."""
    p, m, v, high = (t.clone() for t in state)
    (b1, b2), sign = case.betas, -1 if case.maximize else 1
    for number, grad in enumerate(grads, case.before + 1):
        g = grad * sign
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        high = torch.maximum(high, v)
        m_hat = m / (1 - b1**number)
        v_hat = (high if case.amsgrad else v) / (1 - b2**number)
        p = p - case.lr * (m_hat / (v_hat.sqrt() + case.epsilon) + case.weight_decay * p)
    return [p, m, v]


def adamw_inputs(case: AdamWCase) -> tuple[list[Tensor], list[Tensor]]:
    """State (parameter, moment, square, largest square) and gradients, on the CPU."""
    parameter = normal(case.shape, case.dtype, case.seed)
    moment = normal(case.shape, case.dtype, case.seed + 1, 0.1 if case.before else 0.0)
    square = normal(case.shape, case.dtype, case.seed + 2, 0.1 if case.before else 0.0).abs()
    grads = [normal(case.shape, case.dtype, case.seed + 3 + i, case.size) for i in range(case.taken)]
    return [parameter, moment, square, torch.zeros_like(square)], grads


def check_adamw(case: AdamWCase, surface: Surface) -> list[Quantity]:
    """Parameter and both moments after some updates in place."""
    state, grads = adamw_inputs(case)
    truth = adamw(case, [t.double() for t in state], [g.double() for g in grads])
    rough = adamw(case, state, grads)
    got = [lay_out(t.clone(), case.strides, surface) for t in state]
    for number, grad in enumerate(grads, case.before + 1):
        (b1, b2), sent = case.betas, lay_out(grad, case.strides, surface)
        if case.entry == "kernel":
            kernel = surface.kernels["npu_apply_fused_adamw_v2"]
            rest = (torch.tensor([float(number)]), case.lr, b1, b2, case.weight_decay, case.epsilon, False, case.maximize)
            kernel.npu_apply_fused_adamw_v2(got[0], sent, got[1], got[2], got[3], *rest)
            continue
        numbers = b1 ** (number - 1), b2 ** (number - 1), case.lr, case.weight_decay, b1, b2, case.epsilon
        back = torch.ops.npu.npu_apply_adam_w(*numbers, sent, got[3], case.amsgrad, case.maximize, out=got[:3])
        if [t.data_ptr() for t in back] != [t.data_ptr() for t in got[:3]]:
            raise Wrong("the outputs must be the tensors of `out`, updated in place")
    names = "parameter", "moment", "square"
    # An update divides by the root of the square: near epsilon its error is what the square's rounding makes of it.
    eps = torch.finfo(state[0].dtype).eps
    move = case.lr * case.taken * (1 + eps) * 10
    sizes = [truth[0].abs() + move, truth[1].abs() + case.size * 0.1, truth[2].abs() + case.size**2 * 0.1]
    return [
        Quantity(n, g.cpu(), t, r, state[0].dtype, z, case.taken)
        for n, g, t, r, z in zip(names, got, truth, rough, sizes, strict=False)
    ]
