"""Dot-product attention, written out: scores, mask, softmax, sum. Masks are True where attention is forbidden.

Context parallelism gathers keys and values: a sequence of 2*cp chunks lies on rank r as chunks r and 2*cp-1-r (the
load-balanced order that megatron-core and verl cut for causal attention), so positions are known and the mask is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from transformer_engine.pytorch.strict import PlainBackendError, refuse

CAUSAL = ("causal", "padding_causal")
PADDING = ("padding", "padding_causal")
KNOWN = (*CAUSAL, "padding", "no_mask", "arbitrary")


def attend(query: Tensor, key: Tensor, value: Tensor, forbidden: Tensor | None, scale: float) -> Tensor:
    """query (..., heads, sq, d), key (..., groups, sk, d), value (..., groups, sk, dv) -> (..., heads, sq, dv).

    `forbidden` broadcasts to (..., heads, sq, sk). A row with everything forbidden gives zeros. Computed in float32
    (float64 for float64).
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    repeats = query.shape[-3] // key.shape[-3]
    k, v = (t.repeat_interleave(repeats, dim=-3).to(wide) for t in (key, value))
    scores = query.to(wide) @ k.transpose(-1, -2) * scale
    if forbidden is not None:
        scores = scores.masked_fill(forbidden, float("-inf"))
        empty = forbidden.all(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)
        weights = scores.softmax(-1).masked_fill(empty, 0.0)
    else:
        weights = scores.softmax(-1)
    return (weights @ v).to(query.dtype)


def positions(length: int, rank: int, size: int, device: Any = None) -> Tensor:
    """Global positions of rank's share of a sequence of `length` tokens: chunks rank and 2*size-1-rank, (length/size,)."""
    if size == 1:
        return torch.arange(length, device=device)
    if length % (2 * size):
        raise PlainBackendError(f"context parallelism: {length} tokens do not divide into {2 * size} chunks")
    chunks = torch.arange(length, device=device).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


class DotProductAttention(nn.Module):
    """Stands for transformer_engine.pytorch.DotProductAttention."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        **other: Any,
    ) -> None:
        # None of these changes the numbers of one rank's heads without dropout.
        del sequence_parallel, tp_size, get_rng_state_tracker, tp_group, layer_number, cp_global_ranks, cp_stream
        refuse("DotProductAttention", other, {"window_size": None, "softmax_type": "vanilla", "return_max_logit": False})
        if attention_dropout:
            raise PlainBackendError(f"DotProductAttention: attention_dropout={attention_dropout} is not supported")
        if attention_type != "self":
            raise PlainBackendError(f"DotProductAttention: attention_type={attention_type!r} is not supported")
        # How keys travel (p2p, all_gather) is a matter of speed; a2a forms need other groups.
        if cp_comm_type not in ("p2p", "all_gather"):
            raise PlainBackendError(f"DotProductAttention: cp_comm_type={cp_comm_type!r} is not supported")
        super().__init__()
        qk_channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = softmax_scale if softmax_scale is not None else qk_channels**-0.5
        self.attn_mask_type, self.cp_group = attn_mask_type, cp_group
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, num_gqa_groups

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str = "sbhd",
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        **other: Any,
    ) -> Tensor:
        """sbhd: (s, b, heads, d) -> (s, b, heads*dv). bshd likewise. thd: (t, heads, d) -> (t, heads*dv).

        cu_seqlens_*: (sequences + 1,) int, over the whole context-parallel group; with `_padded`, sequence i occupies
        [padded[i], padded[i+1]) and its first cu[i+1]-cu[i] tokens are valid.
        """
        del max_seqlen_q, max_seqlen_kv  # sizes of CUDA launches
        neutral = {
            "total_tokens": None,
            "seq_idx": None,
            "core_attention_bias_type": "no_bias",
            "core_attention_bias": None,
        }
        refuse("DotProductAttention.forward", other, neutral)
        mask_type = attn_mask_type or self.attn_mask_type
        if mask_type not in KNOWN:
            raise PlainBackendError(f"DotProductAttention.forward: attn_mask_type={mask_type!r} is not supported")
        if qkv_format == "thd":
            if (
                cu_seqlens_q is None
                or not _same(cu_seqlens_q, cu_seqlens_kv)
                or not _same(cu_seqlens_q_padded, cu_seqlens_kv_padded)
            ):
                raise PlainBackendError("DotProductAttention.forward: thd needs equal cu_seqlens of queries and keys")
            return self._packed(query, key, value, cu_seqlens_q, cu_seqlens_q_padded, mask_type)
        if qkv_format == "bshd":
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        elif qkv_format != "sbhd":
            raise PlainBackendError(f"DotProductAttention.forward: qkv_format={qkv_format!r} is not supported")
        out = self._padded(query, key, value, attention_mask, mask_type)
        return out.transpose(0, 1) if qkv_format == "bshd" else out

    def _group(self) -> tuple[int, int]:
        """(rank, size) in the context-parallel group."""
        return (0, 1) if self.cp_group is None else (self.cp_group.rank(), self.cp_group.size())

    def _gather(self, x: Tensor) -> Tensor:
        """(local, ...) of every context-parallel rank -> (size*local, ...), rank after rank; backward reduce-scatters."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        out: Tensor = gather_from_sequence_parallel_region(x.contiguous(), tensor_parallel_output_grad=True, group=self.cp_group)
        return out

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, valid: Tensor, padded: Tensor | None, mask_type: str) -> Tensor:
        rank, size = self._group()
        lengths = (valid[1:] - valid[:-1]).tolist()
        starts = (padded if padded is not None else valid).tolist()
        local = query.shape[0]
        if size > 1:
            key, value = self._gather(key), self._gather(value)
        out = query.new_zeros(local, query.shape[1], value.shape[2])
        for start, end, length in zip(starts[:-1], starts[1:], lengths, strict=True):
            if start == end:
                continue
            here = positions(end - start, rank, size, query.device)
            # Row of token p of the sequence in the gathered keys: its rank's block, then its place in the rank's share.
            rows = torch.empty(end - start, dtype=torch.long, device=query.device)
            for other in range(size):
                share = positions(end - start, other, size, query.device)
                rows[share] = other * local + start // size + torch.arange(len(share), device=query.device)
            # Padding is left out rather than masked: whatever it holds, NaN too, reaches neither values nor gradients.
            mine = start // size + torch.nonzero(here < length).flatten()
            rows = rows[:length]
            forbidden: Tensor | None = None
            if mask_type in CAUSAL:
                forbidden = torch.arange(length, device=query.device) > here[here < length][:, None]
            q, k, v = (t.transpose(0, 1) for t in (query[mine], key[rows], value[rows]))
            out = out.index_copy(0, mine, attend(q, k, v, forbidden, self.softmax_scale).transpose(0, 1))
        return out.reshape(local, -1)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, mask_type: str) -> Tensor:
        rank, size = self._group()
        local = query.shape[0]
        span = local * size
        here = positions(span, rank, size, query.device)
        if size > 1:
            order = torch.cat([positions(span, other, size, query.device) for other in range(size)])
            back = torch.argsort(order)
            key, value = self._gather(key)[back], self._gather(value)[back]
            if mask_type in ("arbitrary", *PADDING):
                raise PlainBackendError(f"DotProductAttention.forward: {mask_type} with context parallelism is not supported")
        columns = torch.arange(key.shape[0], device=query.device)
        forbidden: Tensor | None = None
        if mask_type in CAUSAL:
            forbidden = columns[None, :] > here[:, None]
        if mask_type in ("arbitrary", *PADDING):
            if mask is None:
                raise PlainBackendError(f"DotProductAttention.forward: {mask_type} needs an attention_mask")
            forbidden = mask.bool() if forbidden is None else forbidden | mask.bool()
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = attend(q, k, v, forbidden, self.softmax_scale)
        return out.permute(2, 0, 1, 3).reshape(local, query.shape[1], -1)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and torch.equal(left, right))
