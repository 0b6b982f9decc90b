"""Token permutation and grouped products, against index arithmetic in plain PyTorch."""

from typing import Any

import pytest
import torch
from test_npu_ops_support import TOLERANCE, Trace, agree, close, ops, randn, run
from torch import Tensor

pytestmark = pytest.mark.stack

npu = torch.ops.npu
INDICES = torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]])  # the example of the vendor's documentation
N, K, E, H = 6, 2, 4, 3


def routing_map() -> Tensor:
    chosen = torch.rand(N, E, generator=torch.Generator().manual_seed(3)).topk(K).indices
    return torch.zeros(N, E, dtype=torch.bool).scatter(1, chosen, True)


def test_permute_on_the_inputs_of_the_vendors_example() -> None:
    tokens = torch.tensor([[1.0] * 3, [2.0] * 3, [3.0] * 3, [0.0] * 3])
    permuted, at = npu.npu_moe_token_permute(tokens, INDICES, INDICES.numel())
    assert permuted[:, 0].tolist() == [1, 0, 0, 3, 2, 1, 2, 3]
    assert at.tolist() == [0, 5, 6, 4, 7, 3, 1, 2]
    assert at.dtype == torch.int32


def permute_reference(tokens: Tensor, kept: int) -> Tensor:
    """Row by row: experts in order, tokens in order within an expert."""
    rows = [tokens[t] for e in range(5) for t in range(4) for c in range(2) if INDICES[t, c] == e]
    return torch.stack(rows)[:kept]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kept", "rows"), [(None, 8), (0, 8), (5, 5), (-2, 6)])
def test_permute(dtype: torch.dtype, kept: int | None, rows: int) -> None:
    agree(
        lambda t: npu.npu_moe_token_permute(t, INDICES, kept),
        lambda t: permute_reference(t, rows),
        [randn(4, H, dtype=dtype)],
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [8, 5])
def test_unpermute(dtype: torch.dtype, rows: int) -> None:
    at = npu.npu_moe_token_permute(randn(4, H), INDICES)[1]

    def reference(permuted: Tensor, probs: Tensor) -> Tensor:
        padded = torch.cat((permuted, permuted.new_zeros(8 - rows, H)))
        return (padded[at.long()].view(4, 2, H) * probs[..., None]).sum(1)

    agree(
        lambda p, w: npu.npu_moe_token_unpermute(p, at, w),
        reference,
        [randn(rows, H, dtype=dtype), randn(4, 2, dtype=dtype, seed=2)],
    )


def test_unpermute_undoes_permute() -> None:
    tokens = randn(4, H)
    permuted, at = npu.npu_moe_token_permute(tokens, INDICES)
    close(npu.npu_moe_token_unpermute(permuted, at, torch.full((4, 2), 0.5, dtype=torch.float64)), tokens, 1e-12)
    permuted, at = npu.npu_moe_token_permute(tokens, INDICES[:, 0])
    close(npu.npu_moe_token_unpermute(permuted, at), tokens, 1e-12)


def rows_of(mapped: Tensor, capacity: int | None) -> list[tuple[int, int]]:
    """(token, expert) of each permuted row; with a capacity, experts fill up with tokens that are not theirs."""
    out = []
    for e in range(E):
        order = [t for t in range(N) if mapped[t, e]]
        if capacity is not None:
            order = (order + [t for t in range(N) if not mapped[t, e]])[:capacity]
        out += [(t, e) for t in order]
    return out


MODES = [pytest.param(None, id="dropless"), pytest.param(2, id="capacity-2"), pytest.param(4, id="capacity-4")]


def permute(mapped: Tensor, capacity: int | None) -> Any:
    rows = N * K if capacity is None else E * capacity
    options = {"num_out_tokens": rows, "drop_and_pad": capacity is not None}
    return lambda t, p=None: npu.npu_moe_token_permute_with_routing_map(t, mapped, probs=p, **options)


def unpermute(mapped: Tensor, capacity: int | None, at: Tensor) -> Any:
    options = {"routing_map": mapped, "drop_and_pad": capacity is not None}
    return lambda t, p=None: npu.npu_moe_token_unpermute_with_routing_map(t, at, [N, H], probs=p, **options)


def check_permute(capacity: int | None, dtype: torch.dtype) -> None:
    mapped = routing_map()
    pairs = rows_of(mapped, capacity)
    inputs = [randn(N, H, dtype=dtype), randn(N, E, dtype=dtype, seed=2)]
    token, expert = (torch.tensor(x) for x in zip(*pairs, strict=True))
    # Output and its gradient, and permuted probs and theirs: both outputs are differentiable.
    agree(permute(mapped, capacity), lambda t, p: t[token] + 0 * p.sum(), inputs)
    agree(lambda t, p: permute(mapped, capacity)(t, p)[1], lambda t, p: p[token, expert] + 0 * t.sum(), inputs)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("capacity", MODES)
def test_permute_with_routing_map(capacity: int | None, dtype: torch.dtype) -> None:
    check_permute(capacity, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("capacity", MODES)
@pytest.mark.parametrize("with_probs", [True, False])
def test_unpermute_with_routing_map(capacity: int | None, dtype: torch.dtype, with_probs: bool) -> None:
    mapped = routing_map()
    pairs = rows_of(mapped, capacity)
    at = permute(mapped, capacity)(randn(N, H))[2]

    def reference(rows: Tensor, probs: Tensor | None = None) -> Tensor:
        out = [rows.new_zeros(H) for _ in range(N)]
        for row, (t, e) in zip(rows, pairs, strict=True):
            out[t] = out[t] + row * (1 if probs is None else probs[t, e])
        return torch.stack(out)

    inputs = [randn(len(pairs), H, dtype=dtype)] + [randn(N, E, dtype=dtype, seed=2)] * with_probs
    agree(unpermute(mapped, capacity, at), reference, inputs)


def test_sorted_indices_are_the_vendors_not_megatrons() -> None:
    """permuted[sorted_indices[i]] is token i // K: the inverse of Megatron's list of token numbers."""
    mapped, tokens = routing_map(), randn(N, H)
    permuted, probs, at = permute(mapped, None)(tokens)
    assert torch.equal(permuted[at.long()], tokens.repeat_interleave(K, 0))
    assert probs is None, "an empty tensor would get a gradient, and hardware returns none"
    assert permute(mapped, 2)(tokens)[2].tolist() == [t for t, _ in rows_of(mapped, 2)]


def test_unpermute_undoes_permute_with_routing_map() -> None:
    mapped, tokens = routing_map(), randn(N, H)
    permuted, _, at = permute(mapped, None)(tokens)
    close(unpermute(mapped, None, at)(permuted) / K, tokens, 1e-12)


@pytest.mark.parametrize("capacity", MODES)
def test_gradient_operator_called_as_mindspeed_calls_it(capacity: int | None) -> None:
    """MindSpeed differentiates by hand, with sorted_indices in both places unless it drops and pads."""
    mapped = routing_map()
    at = permute(mapped, capacity)(randn(N, H))[2]
    inputs = randn(len(at), H), randn(N, E, seed=2)
    _, drows, dprobs = run(unpermute(mapped, capacity, at), inputs)
    grad = torch.randn(N, H, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    pad = capacity is not None
    _, index, ids, _ = npu._npu_moe_token_unpermute_with_routing_map(
        inputs[0], at, [N, H], probs=inputs[1], routing_map=mapped, drop_and_pad=pad
    )
    places = (index, ids) if pad else (at, at)
    got = npu.npu_moe_token_unpermute_with_routing_map_grad(
        grad, *places, routing_map=mapped, permuted_tokens=inputs[0], probs=inputs[1], drop_and_pad=pad,
        restore_shape=[N, H]
    )  # fmt: skip
    close(got, (drows, dprobs), 1e-12)


def test_traces_read_as_on_hardware() -> None:
    mapped = routing_map()
    tokens, probs = randn(N, H), randn(N, E, seed=2)
    at = permute(mapped, None)(tokens)[2]
    simple_at = npu.npu_moe_token_permute(randn(4, H), INDICES)[1]
    calls: dict[str, Any] = {
        "npu_moe_token_permute": (lambda t: npu.npu_moe_token_permute(t, INDICES), [randn(4, H)]),
        "npu_moe_token_unpermute": (
            lambda t, p: npu.npu_moe_token_unpermute(t, simple_at, p), [randn(8, H), randn(4, 2)]),
        "npu_moe_token_permute_with_routing_map": (permute(mapped, None), [tokens, probs]),
        "_npu_moe_token_unpermute_with_routing_map": (unpermute(mapped, None, at), [randn(N * K, H), probs]),
    }  # fmt: skip
    for name, (function, inputs) in calls.items():
        with Trace() as trace:
            run(function, inputs)
        assert trace.names[-2:] == [name, name.removeprefix("_") + "_grad"]


def test_dropped_gradient_of_probs_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.moe_routing_map, "scatter_probs", lambda v, m: v.new_zeros(m.shape))
    with pytest.raises(AssertionError, match="off by"):
        check_permute(None, torch.float64)
    with pytest.raises(AssertionError, match="off by"):
        test_unpermute_with_routing_map(None, torch.float64, True)


def test_wrong_expert_of_a_padded_row_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.moe_routing_map, "expert_of_row", lambda rows, experts: torch.arange(rows) % experts)
    with pytest.raises(AssertionError, match="off by"):
        check_permute(2, torch.float64)


def test_forgotten_drop_is_caught() -> None:
    with pytest.raises(AssertionError):
        agree(lambda t: npu.npu_moe_token_permute(t, INDICES, 5), lambda t: permute_reference(t, 8), [randn(4, H)])


def uneven() -> Tensor:
    mapped = routing_map()
    mapped[0] = True
    return mapped


FORBIDDEN: list[tuple[str, Any]] = [
    ("the same number of experts", lambda: permute(uneven(), None)(randn(N, H))),
    ("the same number of experts", lambda: npu.npu_moe_token_permute_with_routing_map(randn(N, H), routing_map())),
    ("must be bool or int8", lambda: permute(routing_map().float(), None)(randn(N, H))),
    ("must be bool or int8", lambda: permute(routing_map().byte(), None)(randn(N, H))),
    ("probs must have tokens' dtype", lambda: npu.npu_moe_token_permute_with_routing_map(
        randn(N, H), routing_map(), probs=randn(N, E).float(), num_out_tokens=N * K)),
    ("exceeds the number of tokens", lambda: permute(routing_map(), N + 1)(randn(N, H))),
    ("tokens, routing_map for", lambda: permute(routing_map(), None)(randn(N + 1, H))),
    ("need routing_map", lambda: npu.npu_moe_token_unpermute_with_routing_map(
        randn(N * K, H), torch.arange(N * K), [N, H], probs=randn(N, E))),
    ("rows of indices", lambda: npu.npu_moe_token_permute(randn(5, H), INDICES)),
    ("must be int32 or int64", lambda: npu.npu_moe_token_permute(randn(4, H), INDICES.float())),
    ("probs .* for 8 indices", lambda: npu.npu_moe_token_unpermute(randn(8, H), torch.arange(8).int(), randn(3, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("sentence", "call"), FORBIDDEN, ids=range(len(FORBIDDEN)))
def test_forbidden_inputs(sentence: str, call: Any) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        call()


def test_padded_mode_is_named() -> None:
    with pytest.raises(NotImplementedError, match="npu_moe_token_permute does not support padded_mode=True"):
        npu.npu_moe_token_permute(randn(4, H), INDICES, padded_mode=True)
