"""The truths of the operators' cases against oracles that nobody here wrote, on the same generated inputs.

Where oracles differ, docs/npu-operators-oracles.md says which is right; the tests here hold each difference in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from operators_oracles import mindstudio, sdpa, tables, torch_adamw, torch_grouped, torch_unpermute, turned
from test_npu_ops_support import ops
from torch import Tensor

from conformance.npu.kernels import kernels
from conformance.operators import attention, elementwise, matmul, moe, strategies
from conformance.operators.attention import AttentionCase
from conformance.operators.elementwise import AdamWCase, RmsNormCase, RotaryCase, SwigluCase
from conformance.operators.surface import Surface, normal

pytestmark = pytest.mark.stack

SURFACE = Surface("cpu", kernels(ops))
quickly = settings(max_examples=40, derandomize=True, database=None, deadline=None)


def agree(got: Tensor, want: Tensor, bound: float = 1e-11) -> None:
    """Same shape, and no further apart than `bound` of the largest entry, or of the inputs, which are of order 1."""
    assert got.shape == want.shape
    if want.numel():
        largest = max(float(want.abs().max()), 1.0)
        assert float((got.double() - want).abs().max()) <= bound * largest


def doubles(case: AttentionCase) -> list[Tensor]:
    return [x.cpu.double() for x in attention.inputs_of(case, SURFACE)]


def gradients(function: Any, inputs: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(function(*leaves), leaves, weight))


@quickly
@given(strategies.attention())
def test_attention_and_torch(case: AttentionCase) -> None:
    assume(min(*case.keys, *case.queries) > 0)
    inputs = doubles(case)
    want = sdpa(case, inputs)
    agree(attention.plain(case)(*inputs)[0], want)
    if all(bool(attention.allowed(case, m).any(-1).all()) for m in range(len(case.queries))):
        weight = normal(want.shape, "float32", 5).double()
        mine = gradients(lambda *t: attention.plain(case)(*t)[0], inputs, weight)
        for got, expected in zip(mine, gradients(lambda *t: sdpa(case, t), inputs, weight), strict=True):
            agree(got, expected, 1e-9)


def probe_attention(case: AttentionCase, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    reference = mindstudio("npu_fusion_attention")
    options = {k: v for k, v in attention.arguments(case, SURFACE).items() if not k.startswith("actual")}
    result: tuple[Tensor, Tensor, Tensor] = reference.npu_fusion_attention(
        *inputs, case.heads, case.layout, scale=case.scale, **options
    )
    return result


def comparable(case: AttentionCase) -> AttentionCase:
    """The case without what mindstudio lacks (packed input, a value of another width) and without the note's differences:
    a mode that wants a mask goes with one, a band with as many keys as queries, and explicit masks leave every row a key."""
    layout = "BSND" if case.packed else case.layout
    queries = (max(case.queries),) * len(case.queries)
    keys = queries if case.mode >= 3 else (max(case.keys),) * len(case.keys)
    mask = "triangle" if case.mode >= 2 else "padding" if case.mask == "rows" else case.mask
    unlimited = {"before": 2147483647, "after": 2147483647} if case.mode < 2 else {}
    return replace(
        case,
        layout=layout,
        value_width=case.width,
        queries=queries,
        keys=keys,
        mask=mask,
        tail=0,
        leading_zero=False,
        **unlimited,
    )


def visible(case: AttentionCase) -> bool:
    return all(bool(attention.allowed(case, m).any(-1).all()) for m in range(len(case.queries)))


@quickly
@given(strategies.attention().map(comparable))
def test_attention_and_mindstudio(case: AttentionCase) -> None:
    assume(visible(case))
    inputs = doubles(case)
    out, top, total = probe_attention(case, inputs)
    want, tops, totals = attention.plain(case)(*inputs)
    agree(out, want, 1e-9)
    mine = [torch.cat([m[..., 0].T for m in s.unbind(0)]) for s in (top, total)]
    agree(mine[0], tops, 1e-9)
    agree(mine[1], totals, 1e-9)


@quickly
@given(strategies.attention().map(comparable))
def test_attention_gradients_and_mindstudio(case: AttentionCase) -> None:
    assume(visible(case))
    inputs = doubles(case)
    weight = normal(inputs[0].shape, "float32", 5).double()
    options = {k: v for k, v in attention.arguments(case, SURFACE).items() if not k.startswith("actual")}
    theirs = mindstudio("npu_fusion_attention").npu_fusion_attention_grad(
        *inputs, weight, case.heads, case.layout, scale_value=case.scale, **options
    )
    mine = gradients(lambda *t: attention.plain(case)(*t)[0], inputs, weight)
    for got, expected in zip(mine, theirs, strict=True):
        agree(got, expected, 1e-9)


SQUARE = AttentionCase("BNSD", "float32", 2, 2, 8, 8, (5, 5), (5, 5))


@pytest.mark.parametrize(
    ("case", "ours_is"),
    [
        (replace(SQUARE, mode=2), "every key seen"),
        (replace(SQUARE, mode=4, mask="triangle", before=1, after=0, keys=(8, 8)), "the band at the lower right"),
        (replace(SQUARE, mode=1, mask="rows"), "zeros"),
    ],
    ids=["no_mask", "band", "rows_without_keys"],
)
def test_where_mindstudio_differs(case: AttentionCase, ours_is: str) -> None:
    """Each difference that the note tells is there, torch sides with us, and so does the operator."""
    inputs = doubles(case)
    theirs = probe_attention(case, inputs)[0]
    mine = attention.plain(case)(*inputs)[0]
    assert not torch.allclose(theirs.double(), mine, atol=1e-3), ours_is
    agree(sdpa(case, inputs), mine)
    agree(attention.call_operator(case, SURFACE, *inputs)[0], mine)


@quickly
@given(strategies.rms_norm())
def test_rms_norm_and_torch(case: RmsNormCase) -> None:
    x = normal(case.shape, "float32", case.seed, case.size).double()
    gamma = normal(case.shape[-case.gamma_dims :], "float32", case.seed + 1).double()
    agree(elementwise.rms_norm(case.epsilon)(x, gamma)[0], F.rms_norm(x, gamma.shape, gamma, case.epsilon))
    if case.gamma_dims > 1:
        return
    out, rstd = mindstudio("rms_norm").npu_rms_norm(x, gamma, case.epsilon)
    mine = elementwise.rms_norm(case.epsilon)(x, gamma)
    agree(mine[0], out)
    agree(mine[1], rstd.double(), 1e-6)
    if not x.numel():
        return
    weight = normal(x.shape, "float32", 9).double()
    dx, dgamma = gradients(lambda *t: elementwise.rms_norm(case.epsilon)(*t)[0], [x, gamma], weight)
    theirs = mindstudio("rms_norm").npu_rms_norm_backward(weight, x, gamma, mine[1])
    assert float((dx - theirs[0]).abs().max()) <= 1e-9 * float((mine[1] * gamma.abs().max()).max() + 1) * 10
    agree(dgamma, theirs[1].reshape(-1, *gamma.shape).sum(0), 1e-9)


@quickly
@given(strategies.swiglu())
def test_swiglu_and_both(case: SwigluCase) -> None:
    x = normal(case.shape, "float32", case.seed, case.size)
    (mine,) = elementwise.swiglu(case.dim)(x.double())
    gate, linear = x.double().chunk(2, case.dim)
    agree(mine, F.silu(gate) * linear)
    agree(mindstudio("swiglu").npu_swiglu(x, case.dim), mine, 1e-6)
    weight = normal(mine.shape, "float32", 9).double()
    (grad,) = gradients(lambda t: elementwise.swiglu(case.dim)(t)[0], [x.double()], weight)
    agree(mindstudio("swiglu").npu_swiglu_backward(weight, x.double(), case.dim), grad)


@quickly
@given(strategies.rotary())
def test_rotary_and_both(case: RotaryCase) -> None:
    x = normal(case.shape, "float32", case.seed).double()
    shape = [1 if i in case.broadcast else n for i, n in enumerate(case.shape)]
    angles = normal((*shape[:3], shape[3] // 2), "float32", case.seed + 1).double()
    r1, r2 = tables(case, angles)
    (mine,) = elementwise.rotary(case.mode)(x, r1, r2)
    agree(mine, turned(case, x, angles))
    if case.mode == "half":  # the only mode that mindstudio has
        agree(mindstudio("rotary_mul").npu_rotary_mul(x, r1, r2), mine)


@quickly
@given(strategies.fused_adamw())
def test_adamw_and_both(case: AdamWCase) -> None:
    state, grads = ([t.double() for t in ts] for ts in elementwise.adamw_inputs(replace(case, dtype="float32")))
    mine = elementwise.adamw(case, state, grads)
    for got, want in zip(mine, torch_adamw(case, state, grads), strict=True):
        agree(got, want, 1e-9)
    if case.amsgrad:  # mindstudio takes random numbers for the running maximum
        return
    theirs = state[:3]
    for number, grad in enumerate(grads, case.before):
        b1, b2 = case.betas
        numbers = b1**number, b2**number, case.lr, case.weight_decay, b1, b2, case.epsilon
        theirs = mindstudio("apply_adam_w").npu_apply_adam_w(*numbers, grad, None, False, case.maximize, out=theirs)
    for got, want in zip(mine, theirs, strict=True):
        agree(got, want, 1e-9)


def test_mindstudio_amsgrad_is_not_a_function_of_its_inputs() -> None:
    case = AdamWCase((7,), "float32", taken=1, amsgrad=True)
    state, grads = ([t.double() for t in ts] for ts in elementwise.adamw_inputs(case))
    call = mindstudio("apply_adam_w").npu_apply_adam_w
    numbers = 1.0, 1.0, case.lr, case.weight_decay, *case.betas, case.epsilon
    one, other = (call(*numbers, grads[0], torch.zeros(7), True, False, out=state[:3])[0] for _ in range(2))
    assert not torch.equal(one, other)


@quickly
@given(strategies.grouped_matmul())
def test_grouped_and_torch(case: matmul.GroupedCase) -> None:
    rows, experts = sum(case.counts), len(case.counts)
    x = normal((rows, case.inner), "float32", case.seed).double()
    w = normal((experts, case.inner, case.outer), "float32", case.seed + 1).double()
    bias = normal((experts, case.outer), "float32", case.seed + 2).double() if case.with_bias else None
    want = torch_grouped(case, x, w, bias)
    agree(matmul._grouped(replace(case, group_type=0), x, w, bias), want)
    weight = normal(want.shape, "float32", 4).double()
    (dw,) = gradients(lambda m: torch_grouped(case, x, m, None), [w], weight)
    agree(matmul._grouped(replace(case, group_type=2), x, weight, None), dw)


@quickly
@given(strategies.moe())
def test_moe_and_torch(case: moe.MoeCase) -> None:
    assume(case.entry != "drop_and_pad" and not case.dropped and case.tokens > 0)
    experts = torch.tensor(moe.choices(case)).view(-1)
    order = torch.argsort(experts, stable=True)
    inverse = torch.argsort(order, stable=True)
    assert torch.equal(moe.sorted_indices(case).long(), inverse)
    assert torch.equal(moe._rows(case)[0], order // case.chosen)
    rows = normal((len(order), case.hidden), "float32", case.seed).double()
    probs = normal((case.tokens, case.chosen), "float32", case.seed + 1).double()
    want = torch_unpermute(case, rows, inverse, probs)
    spread = probs
    if case.entry == "routing_map":
        spread = probs.new_zeros(case.tokens, case.experts).scatter(1, experts.view(case.tokens, -1), probs)
    agree(moe.unpermute(case, SURFACE, rows, moe.sorted_indices(case), spread), want)
