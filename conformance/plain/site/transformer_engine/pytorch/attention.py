"""Scaled dot-product attention over padded and packed input, with context parallelism by gathering keys and values.

Like the fused kernels that it stands in for, it keeps scores and probabilities in float32 (float64 for float64) and
rounds the output once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..errors import only, refuse
from .context_parallel import gather_tokens, local_order
from .masks import AttentionMask, MaskType, after, forbidden_pairs, local_padding, mask_type_of
from .numeric import wide


def attend(query: Tensor, key: Tensor, value: Tensor, forbidden: Tensor | None, scale: float) -> Tensor:
    """softmax(query @ key.T * scale) @ value, heads of keys and values shared by groups of heads of queries.

    Shapes: query (..., heads, q, d), key (..., groups, k, d), value (..., groups, k, dv), forbidden broadcastable to
    (..., heads, q, k), True where a query may not look. Result (..., heads, q, dv), float32 or float64. A query that
    may look nowhere gives zeros, and no gradient.
    """
    sharers = query.shape[-3] // key.shape[-3]
    key, value = (wide(x).repeat_interleave(sharers, dim=-3) for x in (key, value))
    scores = wide(query) @ key.transpose(-1, -2) * scale
    if forbidden is None:
        return scores.softmax(-1) @ value
    nowhere = forbidden.all(-1, keepdim=True)
    # Rows of -inf alone would be nan in forward and backward.
    scores = scores.masked_fill(forbidden & ~nowhere, -math.inf)
    return scores.softmax(-1).masked_fill(nowhere, 0.0) @ value


@dataclass(frozen=True)
class Packing:
    """Sequences in one stream of tokens: sequence i begins at `offsets[i]`, its first `lengths[i]` tokens are valid."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, cu_seqlens: Sequence[int], cu_seqlens_padded: Sequence[int] | None, tokens: int) -> Packing:
        """From running totals of valid lengths and of lengths with padding. ValueError if they contradict each other or
        `tokens`, the length of the stream on all ranks together."""
        offsets = tuple(cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)
        lengths = tuple(b - a for a, b in itertools.pairwise(cu_seqlens))
        room = tuple(b - a for a, b in itertools.pairwise(offsets))
        if len(room) != len(lengths) or any(not 0 <= n <= r for n, r in zip(lengths, room, strict=False)):
            raise ValueError(f"cu_seqlens={list(cu_seqlens)} does not fit cu_seqlens_padded={list(offsets)}")
        if cu_seqlens[0] != 0 or offsets[0] != 0 or offsets[-1] != tokens:
            raise ValueError(f"cu_seqlens must run from 0 to {tokens} tokens: {list(cu_seqlens)}, {list(offsets)}")
        return cls(offsets, lengths)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Packing,
    keys: Packing,
    causal: bool,
    scale: float,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """Attention within each sequence of a packed stream: (tokens, heads, d) -> (tokens, heads, dv), zeros where
    padding.

    With `cp_group` the tensors hold this rank's tokens, the packings describe the whole stream and must be equal.
    Padding is never read. Causality counts from the first token of either side.
    """
    cp, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    if cp > 1 and queries != keys:
        raise ValueError("context parallelism needs the same cu_seqlens for queries and keys")
    held = local_order(queries.offsets, cp, rank)
    whole_key, whole_value = (gather_tokens(x, keys.offsets, 0, cp_group) for x in (key, value))
    rows, outputs = [], []
    for i, (q_valid, k_valid) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
        start, end = queries.offsets[i], queries.offsets[i + 1]
        positions = held[start // cp : end // cp] - start
        valid = (positions < q_valid).nonzero().squeeze(-1)
        row = (start // cp + valid).to(query.device)
        of_keys = slice(keys.offsets[i], keys.offsets[i] + k_valid)
        forbidden = after(positions[valid], k_valid).to(query.device) if causal else None
        outputs.append(
            attend(
                query.index_select(0, row).transpose(0, 1),
                whole_key[of_keys].transpose(0, 1),
                whole_value[of_keys].transpose(0, 1),
                forbidden,
                scale,
            ).transpose(0, 1)
        )
        rows.append(row)
    result = torch.cat(outputs)
    empty = result.new_zeros(query.shape[0], *result.shape[1:])
    return empty.index_copy(0, torch.cat(rows), result).to(query.dtype)


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask_type: MaskType,
    mask: AttentionMask,
    scale: float,
    cp_group: ProcessGroup | None = None,
) -> Tensor:
    """Attention over padded input: (batch, tokens, heads, d) -> (batch, tokens, heads, dv). Masks: see
    `forbidden_pairs`.

    With `cp_group` the tensors hold this rank's tokens, and masks are restricted: see `local_padding`.
    """
    cp = 1 if cp_group is None else cp_group.size()
    tokens = query.shape[1]
    if cp == 1:
        forbidden = forbidden_pairs("DotProductAttention", mask_type, mask, tokens, key.shape[1])
        if forbidden is not None:
            forbidden = forbidden.to(query.device)
    else:
        forbidden = _forbidden_over_ranks(query, mask_type, mask, cp_group)
    whole_key, whole_value = (gather_tokens(x, (0, tokens * cp), 1, cp_group) for x in (key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, whole_key, whole_value))
    return attend(q, k, v, forbidden, scale).transpose(1, 2).to(query.dtype)


def _forbidden_over_ranks(
    query: Tensor, mask_type: MaskType, mask: AttentionMask, cp_group: ProcessGroup | None
) -> Tensor | None:
    """This rank's queries against all ranks' keys: broadcastable to (batch, heads, tokens, tokens * cp)."""
    assert cp_group is not None
    owner, tokens, cp = "DotProductAttention", query.shape[1], cp_group.size()
    if mask_type not in ("causal", "no_mask"):
        refuse(owner, "attn_mask_type", mask_type, "with context parallelism padded input is causal or no_mask only")
    if mask_type == "no_mask":
        return forbidden_pairs(owner, mask_type, mask, tokens, tokens)
    held = local_order((0, tokens * cp), cp, cp_group.rank()).to(query.device)
    causal = after(held, tokens * cp)
    if mask is None:
        return causal
    if isinstance(mask, tuple):
        refuse(owner, "attention_mask", "a pair", "with context parallelism: (batch, 1, tokens, tokens) only")
    own = local_padding(owner, mask)
    others = gather_tokens(own.to(query.dtype), (0, tokens * cp), -1, cp_group) > 0
    return causal | own[..., None] | others[..., None, :]


class DotProductAttention(nn.Module):
    """Transformer Engine's attention. It has no parameters and no extra state."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: ProcessGroup | None = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: ProcessGroup | list[ProcessGroup] | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
    ) -> None:
        """Sequence parallelism, TP groups, random streams and the CP stream make no difference to the numbers."""
        super().__init__()
        del sequence_parallel, get_rng_state_tracker, tp_group
        owner = type(self).__name__
        only(owner, None, window_size=window_size)
        if attention_type not in ("self", "cross"):
            refuse(owner, "attention_type", attention_type)
        key_channels, value_channels = (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        # Under Transformer Engine's names: verl pads the values of latent attention and writes their new size here.
        self.hidden_size_per_attention_head_k = key_channels
        self.hidden_size_per_attention_head_v = value_channels
        self.num_attention_heads_per_partition = num_attention_heads // tp_size
        self.num_gqa_groups_per_partition = (num_gqa_groups or num_attention_heads) // tp_size
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = mask_type_of(owner, attn_mask_type)
        self.attention_type = attention_type
        self.layer_number = layer_number
        self.softmax_scale = key_channels**-0.5 if softmax_scale is None else softmax_scale
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self,
        cp_group: ProcessGroup | list[ProcessGroup] | None,
        cp_global_ranks: list[int] | None,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
    ) -> None:
        """`cp_group=None`: no context parallelism. The ways of communicating differ in traffic, not in the result."""
        del cp_global_ranks, cp_stream
        if cp_comm_type not in ("p2p", "all_gather", "a2a") or isinstance(cp_group, list):
            refuse(type(self).__name__, "cp_comm_type", cp_comm_type, "hierarchical context parallelism")
        self.cp_group = cp_group
        self.cp_comm_type = cp_comm_type

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: AttentionMask = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: object = None,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        """Heads are joined in the output: (tokens, heads * dv) for `thd`, (s, b, ...) for `sbhd`, (b, s, ...) for
        `bshd`.

        `thd` goes by cu_seqlens, padded input by `attention_mask`. The maximal lengths and `fast_zero_fill` are hints.
        """
        owner = type(self).__name__
        only(owner, None, window_size=window_size, core_attention_bias=core_attention_bias, alibi_slopes=alibi_slopes)
        only(owner, None, inference_params=inference_params, pad_between_seqs=pad_between_seqs)
        only(owner, False, checkpoint_core_attention=checkpoint_core_attention)
        only(owner, "no_bias", core_attention_bias_type=core_attention_bias_type)
        del max_seqlen_q, max_seqlen_kv, fast_zero_fill
        if self.training and self.attention_dropout:
            refuse(owner, "attention_dropout", self.attention_dropout, "random, so never the same as another library's")
        self._check_heads(query_layer, key_layer, value_layer)
        mask_type = self.attn_mask_type if attn_mask_type is None else mask_type_of(owner, attn_mask_type)
        layout = qkv_format or self.qkv_format
        if layout == "thd":
            if mask_type not in ("padding", "padding_causal"):
                refuse(owner, "attn_mask_type", mask_type, "packed input takes padding or padding_causal")
            only(owner, None, attention_mask=attention_mask)
            cp = 1 if self.cp_group is None else self.cp_group.size()
            queries = _packing("q", cu_seqlens_q, cu_seqlens_q_padded, query_layer.shape[0] * cp)
            keys = _packing("kv", cu_seqlens_kv, cu_seqlens_kv_padded, key_layer.shape[0] * cp)
            output = packed_attention(
                query_layer,
                key_layer,
                value_layer,
                queries,
                keys,
                mask_type == "padding_causal",
                self.softmax_scale,
                self.cp_group,
            )
        elif layout in ("sbhd", "bshd"):
            only(owner, None, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
            only(owner, None, cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_kv_padded)
            q, k, v = (x.transpose(0, 1) if layout == "sbhd" else x for x in (query_layer, key_layer, value_layer))
            output = padded_attention(q, k, v, mask_type, attention_mask, self.softmax_scale, self.cp_group)
            output = output.transpose(0, 1) if layout == "sbhd" else output
        else:
            refuse(owner, "qkv_format", layout)
        return output.flatten(-2).contiguous()

    def _check_heads(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        groups, of_key = self.num_gqa_groups_per_partition, self.hidden_size_per_attention_head_k
        for name, x, wanted in (
            ("query", query, (self.num_attention_heads_per_partition, of_key)),
            ("key", key, (groups, of_key)),
            ("value", value, (groups, self.hidden_size_per_attention_head_v)),
        ):
            if tuple(x.shape[-2:]) != wanted:
                raise ValueError(f"{name} of shape {tuple(x.shape)}: expected (heads, channels) = {wanted}")


def _packing(side: str, cu_seqlens: Tensor | None, padded: Tensor | None, tokens: int) -> Packing:
    if cu_seqlens is None:
        raise ValueError(f"packed input needs cu_seqlens_{side}")
    return Packing.of(cu_seqlens.tolist(), None if padded is None else padded.tolist(), tokens)
