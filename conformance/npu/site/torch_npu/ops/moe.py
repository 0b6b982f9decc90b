"""Token permutation by expert indices: npu_moe_token_permute, npu_moe_token_unpermute and their gradients.

`sorted_indices` is, for every (token, choice) in row-major order, the row of the permuted tensor where it went. Unlike
Megatron's it is not cut to `num_out_tokens`: an entry beyond the permuted rows belongs to a dropped token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import floating, refuse, require, wide
from ._registry import Arguments, Derivative, differentiable, kernel


def invert(order: Tensor) -> Tensor:
    """The inverse of a permutation, int32."""
    inverse = torch.empty_like(order, dtype=torch.int32)
    inverse[order] = torch.arange(order.numel(), dtype=torch.int32)
    return inverse


def collect(rows: Tensor, at: Tensor, choices: int) -> Tensor:
    """(N * choices,) positions -> (N, choices, H) rows in wide dtype; a position past the end gives zeros."""
    at = at.long()
    kept = at < rows.shape[0]
    picked = wide(rows)[torch.where(kept, at, 0)] if rows.shape[0] else wide(rows).new_zeros(len(at), rows.shape[1])
    # No tokens: 0 choices of 0 rows, where a -1 would have no meaning.
    return (picked * kept[:, None]).view(len(at) // max(choices, 1), choices, rows.shape[1])


def place(values: Tensor, at: Tensor, rows: int) -> Tensor:
    """The inverse of `collect`: (N * choices, H) values go to their rows of a (rows, H) tensor, the rest is dropped."""
    at = at.long()
    kept = at < rows
    out = values.new_zeros(rows, *values.shape[1:])
    out[at[kept]] = values[kept]
    return out


def _plain(op: str, padded_mode: bool) -> None:
    if padded_mode:
        refuse(op, "padded_mode", padded_mode)


@kernel("npu_moe_token_permute")
def token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows of `tokens` (N, H) repeated and stably sorted by expert: (num_out_tokens, H) and int32 (N * K,).

    `indices` (N,) or (N, K) holds expert numbers. `num_out_tokens` None or 0 keeps all, negative counts from the end.
    """
    op = "npu_moe_token_permute"
    _plain(op, padded_mode)
    require(tokens.dim() == 2, op, f"tokens must have 2 dimensions, got {tokens.dim()}.")
    require(indices.dim() in (1, 2), op, f"indices must have 1 or 2 dimensions, got {indices.dim()}.")
    require(indices.dtype in (torch.int32, torch.int64), op, f"indices must be int32 or int64, got {indices.dtype}.")
    require(len(indices) == len(tokens), op, f"{len(indices)} rows of indices for {len(tokens)} tokens.")
    floating(op, tokens=tokens)
    require(not bool((indices < 0).any()), op, "indices must not be negative.")
    rows = num_out_tokens or 0
    require(abs(rows) <= indices.numel(), op, f"num_out_tokens is {rows}, there are {indices.numel()} indices.")
    order = torch.argsort(indices.reshape(-1), stable=True)
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    kept = order[: num_out_tokens or None]
    return tokens[kept // choices], invert(order)


@kernel("npu_moe_token_permute_grad")
def token_permute_grad(
    tokens: Tensor, grad_permuted_tokens: Tensor, indices: Tensor, sorted_indices: Tensor, padded_mode: bool = False
) -> Tensor:
    """Gradient of tokens: the sum over a token's copies."""
    op = "npu_moe_token_permute_grad"
    _plain(op, padded_mode)
    require(
        sorted_indices.numel() == indices.numel(),
        op,
        f"sorted_indices has {sorted_indices.numel()} entries, indices {indices.numel()}.",
    )
    choices = 1 if indices.dim() == 1 else indices.shape[1]
    return collect(grad_permuted_tokens, sorted_indices, choices).sum(1).to(tokens.dtype)


def _choices(op: str, sorted_indices: Tensor, probs: Tensor | None) -> int:
    require(sorted_indices.dim() == 1, op, f"sorted_indices must have 1 dimension, got {sorted_indices.dim()}.")
    require(sorted_indices.dtype == torch.int32, op, f"sorted_indices must be int32, got {sorted_indices.dtype}.")
    places = torch.arange(len(sorted_indices), dtype=torch.int32)
    sentence = f"sorted_indices must have each place from 0 to {len(places) - 1} once."
    require(torch.equal(sorted_indices.sort().values, places), op, sentence)
    if probs is None:
        return 1
    require(probs.dim() == 2, op, f"probs must have 2 dimensions, got {probs.dim()}.")
    require(probs.numel() == len(sorted_indices), op, f"probs {tuple(probs.shape)} for {len(sorted_indices)} indices.")
    return probs.shape[1]


@kernel("npu_moe_token_unpermute")
def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,  # noqa: ARG001 - counts in padded mode only
) -> Tensor:
    """(N, H): the sum of each token's rows, weighted by `probs` (N, K). Without probs K is 1."""
    op = "npu_moe_token_unpermute"
    _plain(op, padded_mode)
    require(permuted_tokens.dim() == 2, op, f"permuted_tokens must have 2 dimensions, got {permuted_tokens.dim()}.")
    rows = collect(permuted_tokens, sorted_indices, _choices(op, sorted_indices, probs))
    weighted = rows if probs is None else rows * wide(probs)[..., None]
    return weighted.sum(1).to(permuted_tokens.dtype)


@kernel("npu_moe_token_unpermute_grad")
def token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,  # noqa: ARG001 - counts in padded mode only
) -> tuple[Tensor, Tensor | None]:
    """Gradients of permuted_tokens and of probs (None without probs)."""
    op = "npu_moe_token_unpermute_grad"
    _plain(op, padded_mode)
    choices = _choices(op, sorted_indices, probs)
    tokens = len(sorted_indices) // max(choices, 1)
    require(
        len(grad_unpermuted_tokens) == tokens,
        op,
        f"grad_unpermuted_tokens has {len(grad_unpermuted_tokens)} rows, sorted_indices is of {tokens} tokens.",
    )
    grad = wide(grad_unpermuted_tokens)[:, None].expand(-1, choices, -1)
    weighted = grad if probs is None else grad * wide(probs)[..., None]
    dtokens = place(weighted.flatten(0, 1), sorted_indices, len(permuted_tokens)).to(permuted_tokens.dtype)
    if probs is None:
        return dtokens, None
    return dtokens, (collect(permuted_tokens, sorted_indices, choices) * grad).sum(-1).to(probs.dtype)


def _permute_backward(call: Arguments, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor]:
    return (torch.ops.npu.npu_moe_token_permute_grad(call["tokens"], grads[0], call["indices"], outputs[1], call["padded_mode"]),)


def _unpermute_backward(
    call: Arguments,
    outputs: Sequence[Tensor],  # noqa: ARG001
    grads: Sequence[Tensor],
) -> tuple[Tensor, Tensor | None]:
    names = "sorted_indices", "probs", "padded_mode", "restore_shape"
    dtokens, dprobs = torch.ops.npu.npu_moe_token_unpermute_grad(
        call["permuted_tokens"], grads[0], *(call[name] for name in names)
    )
    return dtokens, None if call["probs"] is None else dprobs


differentiable(Derivative("npu_moe_token_permute", ("tokens",), _permute_backward))
differentiable(Derivative("npu_moe_token_unpermute", ("permuted_tokens", "probs"), _unpermute_backward))
