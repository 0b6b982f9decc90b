"""Token permutation by a routing map: the four `..._with_routing_map` operators and their gradients.

Without `drop_and_pad` every token goes to the same number K of experts, and `sorted_indices` (N * K) is, for every
(token, choice) in row-major order, the row where it went: the inverse of what Megatron's own `permute` returns. With
`drop_and_pad` every expert takes `capacity` tokens, and `sorted_indices` (E * capacity) holds token numbers, expert by
expert. Both as CANN documents MoeTokenPermuteWithRoutingMap.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import require, wide
from ._registry import Arguments, Derivative, differentiable, kernel
from .moe import collect, place


def _check_map(op: str, routing_map: Tensor) -> None:
    require(routing_map.dim() == 2, op, f"routing_map must have 2 dimensions, got {routing_map.dim()}.")
    dtypes = torch.bool, torch.int8
    require(routing_map.dtype in dtypes, op, f"routing_map must be bool or int8, got {routing_map.dtype}.")


def _choices(op: str, routing_map: Tensor, rows: int) -> int:
    """K, the number of experts of each token; the vendor demands that it is the same for all."""
    _check_map(op, routing_map)
    counts = routing_map.bool().sum(1)
    choices = rows // max(len(routing_map), 1)
    require(
        bool((counts == choices).all()) and choices * len(routing_map) == rows,
        op,
        f"every token must have the same number of experts, {rows} rows over {len(routing_map)} tokens, got counts "
        f"from {int(counts.min()) if len(counts) else 0} to {int(counts.max()) if len(counts) else 0}.",
    )
    return choices


def select_probs(values: Tensor, routing_map: Tensor) -> Tensor:
    """(N, E) -> (N * K,) in the order of the permuted rows: expert by expert."""
    return values.T.masked_select(routing_map.bool().T)


def scatter_probs(values: Tensor, routing_map: Tensor) -> Tensor:
    """The inverse of `select_probs`, zero elsewhere."""
    zeros = values.new_zeros(routing_map.shape[1], routing_map.shape[0])
    return zeros.masked_scatter(routing_map.bool().T, values).T.contiguous()


def expert_of_row(rows: int, experts: int) -> Tensor:
    """With drop_and_pad: the expert of each permuted row."""
    return torch.arange(rows) // (rows // experts)


@kernel("npu_moe_token_permute_with_routing_map")
def permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Permuted tokens (rows, H), permuted probs (rows,) (None without probs), sorted_indices int32 (rows,).

    `num_out_tokens` is the number of rows: N * K, or E * capacity with drop_and_pad; None means N.
    """
    op = "npu_moe_token_permute_with_routing_map"
    _check_map(op, routing_map)
    require(tokens.dim() == 2, op, f"tokens must have 2 dimensions, got {tokens.dim()}.")
    require(len(tokens) == len(routing_map), op, f"{len(tokens)} tokens, routing_map for {len(routing_map)}.")
    if probs is not None:
        require(probs.shape == routing_map.shape, op, "probs must have routing_map's shape.")
        require(probs.dtype == tokens.dtype, op, f"probs must have tokens' dtype {tokens.dtype}, got {probs.dtype}.")
    rows = len(tokens) if num_out_tokens is None else num_out_tokens
    if drop_and_pad:
        experts = routing_map.shape[1]
        require(rows % experts == 0, op, f"num_out_tokens {rows} does not divide over {experts} experts.")
        capacity = rows // experts
        require(capacity <= len(tokens), op, f"capacity {capacity} exceeds the number of tokens, {len(tokens)}.")
        by_need = routing_map.T.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        chosen = by_need[:, :capacity].reshape(-1)
        picked = None if probs is None else probs[chosen, expert_of_row(len(chosen), experts)]
        return tokens[chosen], picked, chosen.to(torch.int32)
    _choices(op, routing_map, rows)
    # Positions (expert, token) in expert order; ranking them by token gives each token's rows in expert order.
    token_of_row = routing_map.bool().T.nonzero()[:, 1]
    picked = None if probs is None else select_probs(probs, routing_map)
    return tokens[token_of_row], picked, token_of_row.argsort(stable=True).to(torch.int32)


@kernel("npu_moe_token_permute_with_routing_map_grad")
def permute_with_routing_map_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of tokens (N, H) and of probs (N, E), the latter None without `probs_grad`."""
    grad = permuted_token_out_grad
    if drop_and_pad:
        at = sorted_indices.long()
        dtokens = wide(grad).new_zeros(tokens_num, grad.shape[1]).index_add_(0, at, wide(grad))
        if probs_grad is None:
            return dtokens.to(grad.dtype), None
        dprobs = probs_grad.new_zeros(tokens_num, experts_num)
        dprobs[at, expert_of_row(len(at), experts_num)] = probs_grad
        return dtokens.to(grad.dtype), dprobs
    choices = _choices("npu_moe_token_permute_with_routing_map_grad", routing_map, len(sorted_indices))
    dtokens = collect(grad, sorted_indices, choices).sum(1)
    return dtokens.to(grad.dtype), None if probs_grad is None else scatter_probs(probs_grad, routing_map)


@kernel("_npu_moe_token_unpermute_with_routing_map")
def unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Output (N, H) = `restore_shape`, out_index, permuted_token_id, permuted probs (None without probs).

    With drop_and_pad, permuted_token_id is sorted_indices in rising order and out_index the rows they come from.
    Without, the gradient wants sorted_indices in both places (so MindSpeed calls it) and both are returned so.
    """
    op = "npu_moe_token_unpermute_with_routing_map"
    require(len(sorted_indices) == len(permuted_tokens), op, "sorted_indices and permuted_tokens differ in length.")
    shaped = len(restore_shape) == 2 and restore_shape[1] == permuted_tokens.shape[-1]
    require(shaped, op, f"restore_shape must be (tokens, {permuted_tokens.shape[-1]}), got {restore_shape}.")
    rows, experts = wide(permuted_tokens), 0 if probs is None else probs.shape[1]
    picked = None
    if drop_and_pad:
        at = sorted_indices.long()
        if probs is not None:
            picked = probs[at, expert_of_row(len(at), experts)]
            rows = rows * wide(picked)[:, None]
        out = rows.new_zeros(restore_shape).index_add_(0, at, rows)
        ids, index = sorted_indices.sort(stable=True)
        return out.to(permuted_tokens.dtype), index.to(torch.int32), ids, picked
    if probs is not None:
        if routing_map is None:
            raise RuntimeError(f"{op}: probs without drop_and_pad need routing_map.")
        picked = select_probs(probs, routing_map)
        require(len(picked) == len(rows), op, f"routing_map selects {len(picked)} probs for {len(rows)} rows.")
        rows = rows * wide(picked)[:, None]
    tokens = restore_shape[0]
    require(len(rows) % max(tokens, 1) == 0, op, f"{len(rows)} rows do not divide over {tokens} tokens.")
    out = collect(rows, sorted_indices, len(rows) // max(tokens, 1)).sum(1)
    return out.to(permuted_tokens.dtype), sorted_indices.clone(), sorted_indices.clone(), picked


@kernel("npu_moe_token_unpermute_with_routing_map", "CompositeImplicitAutograd")
def public_unpermute_with_routing_map(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: list[int],
    *,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    drop_and_pad: bool = False,
) -> Tensor:
    """The first output of `_npu_moe_token_unpermute_with_routing_map`."""
    outputs: Sequence[Tensor] = torch.ops.npu._npu_moe_token_unpermute_with_routing_map(
        permuted_tokens, sorted_indices, restore_shape, probs=probs, routing_map=routing_map, drop_and_pad=drop_and_pad
    )
    return outputs[0]


@kernel("npu_moe_token_unpermute_with_routing_map_grad")
def unpermute_with_routing_map_grad(
    unpermuted_tokens_grad: Tensor,
    out_index: Tensor,
    permuted_token_id: Tensor,
    routing_map: Tensor | None,
    permuted_tokens: Tensor | None,
    probs: Tensor | None,
    drop_and_pad: bool,
    restore_shape: list[int],
) -> tuple[Tensor, Tensor | None]:
    """Gradients of permuted_tokens (rows, H) and of probs (N, E), the latter None without probs.

    Row out_index[i] gets the gradient of token permuted_token_id[i] with drop_and_pad, of token i // K without.
    """
    op = "npu_moe_token_unpermute_with_routing_map_grad"
    dtype, grad = unpermuted_tokens_grad.dtype, wide(unpermuted_tokens_grad)
    rows = len(out_index)
    choices = max(rows // max(restore_shape[0], 1), 1)
    token_of = permuted_token_id.long() if drop_and_pad else torch.arange(rows) // choices
    row_grad = place(grad[token_of], out_index, rows)
    if probs is None:
        return row_grad.to(dtype), None
    if permuted_tokens is None or routing_map is None:
        raise RuntimeError(f"{op}: probs need permuted_tokens and routing_map.")
    expert_order = (row_grad * wide(permuted_tokens)).sum(-1)
    if drop_and_pad:
        token_of_row, experts = place(token_of, out_index, rows), expert_of_row(rows, probs.shape[1])
        picked = probs[token_of_row, experts]
        dprobs = expert_order.new_zeros(probs.shape)
        dprobs[token_of_row, experts] = expert_order
    else:
        picked, dprobs = select_probs(probs, routing_map), scatter_probs(expert_order, routing_map)
    return (row_grad * wide(picked)[:, None]).to(dtype), dprobs.to(probs.dtype)


def _permute_backward(call: Arguments, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    with_probs = call["probs"] is not None
    dtokens, dprobs = torch.ops.npu.npu_moe_token_permute_with_routing_map_grad(
        grads[0],
        grads[1] if with_probs else None,
        *(outputs[2], call["routing_map"], call["routing_map"].shape[1], len(call["tokens"]), call["drop_and_pad"]),
    )
    return dtokens, dprobs if with_probs else None


def _unpermute_backward(call: Arguments, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    with_probs = call["probs"] is not None
    dtokens, dprobs = torch.ops.npu.npu_moe_token_unpermute_with_routing_map_grad(
        grads[0],
        *(outputs[1], outputs[2], call["routing_map"], call["permuted_tokens"] if with_probs else None, call["probs"]),
        *(call["drop_and_pad"], call["restore_shape"]),
    )
    return dtokens, dprobs if with_probs else None


differentiable(Derivative("npu_moe_token_permute_with_routing_map", ("tokens", "probs"), _permute_backward, outputs=(0, 1)))
differentiable(Derivative("_npu_moe_token_unpermute_with_routing_map", ("permuted_tokens", "probs"), _unpermute_backward))
