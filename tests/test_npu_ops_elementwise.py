"""RMS norm, SwiGLU, rotary embedding, masked softmax, casts and allocation, against PyTorch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_npu_ops_support import TOLERANCE, Trace, agree, close, ops, randn, run
from torch import Tensor

pytestmark = pytest.mark.stack

npu = torch.ops.npu
EPSILON = 1e-5


def rms_norm(x: Tensor, gamma: Tensor) -> Any:
    return npu.npu_rms_norm(x, gamma, epsilon=EPSILON)


def rms_norm_reference(x: Tensor, gamma: Tensor) -> Tensor:
    return F.rms_norm(x, gamma.shape, gamma, EPSILON)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("normed", [(6,), (4, 6)])
def test_rms_norm(dtype: torch.dtype, normed: tuple[int, ...]) -> None:
    agree(rms_norm, rms_norm_reference, [0.02 * randn(3, 4, 6, dtype=dtype), randn(*normed, dtype=dtype, seed=2)])


def test_rms_norm_second_output() -> None:
    x = randn(3, 6)
    rstd = npu.npu_rms_norm(x.float(), torch.ones(6), EPSILON)[1]
    close(rstd, (x.pow(2).mean(-1, keepdim=True) + EPSILON).rsqrt(), 1e-6)
    assert npu.npu_rms_norm(x.bfloat16(), torch.ones(6).bfloat16())[1].dtype == torch.float32


def test_wrong_epsilon_is_caught() -> None:
    inputs = [0.02 * randn(3, 6), randn(6, seed=2)]
    with pytest.raises(AssertionError, match="off by"):
        agree(lambda x, g: npu.npu_rms_norm(x, g, epsilon=1e-6), rms_norm_reference, inputs)


def swiglu_reference(x: Tensor, dim: int = -1) -> Tensor:
    gate, linear = x.chunk(2, dim)
    return F.silu(gate) * linear


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [-1, 0])
def test_swiglu(dtype: torch.dtype, dim: int) -> None:
    agree(lambda x: npu.npu_swiglu(x, dim=dim), lambda x: swiglu_reference(x, dim), [randn(4, 6, dtype=dtype)])


def test_swapped_halves_are_caught() -> None:
    with pytest.raises(AssertionError, match="off by"):
        agree(lambda x: npu.npu_swiglu(x.roll(3, -1)), swiglu_reference, [randn(4, 6)])


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Each pair as a complex number times (cos + i sin), written for tables that differ within a pair."""
    half = x.shape[-1] // 2
    order = torch.arange(2 * half).view(2, half) if mode == "half" else torch.arange(2 * half).view(half, 2).T
    first, second = x[..., order[0]], x[..., order[1]]
    out = torch.empty_like(x)
    out[..., order[0]] = first * cos[..., order[0]] - second * sin[..., order[0]]
    out[..., order[1]] = second * cos[..., order[1]] + first * sin[..., order[1]]
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("table", [(5, 1, 1, 8), (5, 2, 3, 8)])
def test_rotary(dtype: torch.dtype, mode: str, table: tuple[int, ...]) -> None:
    if mode == "interleave":
        table = (5, 1, 1, 8)  # the only one of the two that the vendor takes
    inputs = [randn(5, 2, 3, 8, dtype=dtype), randn(*table, dtype=dtype, seed=2), randn(*table, dtype=dtype, seed=3)]
    agree(lambda *t: npu.npu_rotary_mul(*t, mode), lambda x, c, s: rotary_reference(x, c, s, mode), inputs)


def test_wrong_rotary_mode_is_caught() -> None:
    inputs = [randn(5, 2, 3, 8), randn(5, 1, 1, 8, seed=2), randn(5, 1, 1, 8, seed=3)]
    with pytest.raises(AssertionError, match="off by"):
        agree(lambda *t: npu.npu_rotary_mul(*t, "interleave"), lambda x, c, s: rotary_reference(x, c, s, "half"), inputs)


def softmax_reference(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax((0.5 * x).masked_fill(mask, float("-inf")), -1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("triangular", [False, True])
def test_scaled_masked_softmax(dtype: torch.dtype, triangular: bool) -> None:
    mask = randn(2, 1, 32, 64, seed=4) > 0.3
    mask[..., 0] = False
    seen = torch.ones(32, 64, dtype=torch.bool).triu(1) if triangular else mask
    agree(
        lambda x: npu.npu_scaled_masked_softmax(x, mask, 0.5, triangular),
        lambda x: softmax_reference(x, seen),
        [randn(2, 3, 32, 64, dtype=dtype)],
    )


def test_fully_masked_softmax_row_is_uniform() -> None:
    out = npu.npu_scaled_masked_softmax(randn(1, 1, 32, 32), torch.ones(1, 1, 32, 32, dtype=torch.bool), 1.0, False)
    close(out, torch.full_like(out, 1 / 32), 1e-12)


def test_unmasked_softmax_is_caught() -> None:
    mask = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    with pytest.raises(AssertionError, match="off by"):
        agree(
            lambda x: npu.npu_scaled_masked_softmax(x, mask, 0.5, False),
            lambda x: softmax_reference(x, mask.logical_not().triu(1)),
            [randn(1, 1, 32, 32)],
        )


def test_dtype_cast() -> None:
    x = randn(3, dtype=torch.float32).requires_grad_()
    with Trace() as trace:
        out = npu.npu_dtype_cast(x, torch.bfloat16)
        out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, x.detach().bfloat16())
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert trace.names == ["npu_dtype_cast", "npu_dtype_cast_backward"]


def test_formats_and_allocation() -> None:
    assert [npu.get_npu_format(torch.empty((1,) * n)) for n in (2, 4, 5)] == [2, 0, 30]
    assert torch.equal(npu.npu_format_cast(randn(2, 3), 2), randn(2, 3))
    with Trace() as trace:
        swapped = npu.empty_with_swapped_memory([2, 3], dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (swapped.shape, swapped.dtype) == ((2, 3), torch.bfloat16)
    assert trace.names == ["empty_with_swapped_memory"]


CALLS: dict[str, tuple[Any, list[Tensor]]] = {
    "npu_rms_norm": (npu.npu_rms_norm, [randn(3, 6), randn(6)]),
    "npu_swiglu": (npu.npu_swiglu, [randn(3, 6)]),
    "npu_rotary_mul": (npu.npu_rotary_mul, [randn(1, 2, 3, 4), randn(1, 1, 1, 4), randn(1, 1, 1, 4)]),
    "npu_scaled_masked_softmax": (
        lambda x: npu.npu_scaled_masked_softmax(x, torch.zeros(1, 1, 1, 1, dtype=torch.bool)),
        [randn(1, 1, 32, 32)],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_trace_reads_as_on_hardware(name: str) -> None:
    function, inputs = CALLS[name]
    with Trace() as trace:
        run(function, inputs)
    assert trace.names == [name, f"{name}_backward"]


def test_no_gradient_no_backward_graph() -> None:
    assert npu.npu_rms_norm(randn(2, 4), randn(4))[0].grad_fn is None
    out, rstd = npu.npu_rms_norm(randn(2, 4).requires_grad_(), randn(4))
    assert out.requires_grad
    assert not rstd.requires_grad


FORBIDDEN: list[tuple[str, Any, str]] = [
    ("swiglu", lambda: npu.npu_swiglu(randn(2, 5)), "must be even"),
    ("gamma dtype", lambda: npu.npu_rms_norm(randn(2, 4), randn(4).float()), "gamma must have input's dtype"),
    ("gamma shape", lambda: npu.npu_rms_norm(randn(2, 4), randn(5)), "must equal input's last dimensions"),
    ("rotary rank", lambda: npu.npu_rotary_mul(randn(2, 4), randn(2, 4), randn(2, 4)), "must have 4 dimensions"),
    ("rotary odd", lambda: npu.npu_rotary_mul(*[randn(1, 1, 1, 3)] * 3), "must be even"),
    ("rotary table", lambda: npu.npu_rotary_mul(randn(4, 1, 1, 4), *[randn(2, 1, 1, 4)] * 2), "must broadcast"),
    ("softmax size", lambda: npu.npu_scaled_masked_softmax(randn(1, 1, 8, 8), randn(8, 8) > 0), "multiples of 32"),
    ("softmax mask", lambda: npu.npu_scaled_masked_softmax(randn(1, 1, 32, 32), randn(1, 1, 32, 32)), "must be bool"),
    ("softmax shape", lambda: npu.npu_scaled_masked_softmax(randn(1, 1, 32, 32), randn(32, 8) > 0), "must broadcast"),
]


@pytest.mark.parametrize(("call", "sentence"), [(c, s) for _, c, s in FORBIDDEN], ids=[n for n, _, _ in FORBIDDEN])
def test_forbidden_inputs(call: Any, sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        call()


ROTARY = [randn(1, 1, 1, 4)] * 3
UNSUPPORTED: list[tuple[str, Any]] = [
    ("npu_rotary_mul does not support rotary_mode='quarter'", lambda: npu.npu_rotary_mul(*ROTARY, "quarter")),
    ("npu_rotary_mul does not support rotate=", lambda: npu.npu_rotary_mul(*ROTARY, "half", randn(4, 4))),
    ("npu_format_cast does not support acl_format=29", lambda: npu.npu_format_cast(randn(2, 2), 29)),
    ("npu_dtype_cast does not support dtype=290", lambda: npu.npu_dtype_cast(randn(2), 290)),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "call"), UNSUPPORTED, ids=[s for s, _ in UNSUPPORTED])
def test_unsupported_values_are_named(sentence: str, call: Any) -> None:
    with pytest.raises(NotImplementedError, match=sentence):
        call()


def test_wrong_softmax_fill_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.softmax, "MASKED", -1.0)
    with pytest.raises(AssertionError, match="off by"):
        test_scaled_masked_softmax(torch.float64, False)
