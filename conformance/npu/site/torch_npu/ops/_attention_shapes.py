"""Layouts, packed sequences and masks of the attention operators."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ._checks import floating, refuse, require

_RANK = {"SBH": 3, "BSH": 3, "BNSD": 4, "BSND": 4, "TND": 3}
_COMPRESSED = 2048  # side of the triangular mask that sparse modes 2, 3 and 4 take whatever the lengths
_MASK_MODES = (0, 1, 2, 3, 4)
_WIDEST = 768  # of a head


def check_inputs(op: str, query: Tensor, key: Tensor, value: Tensor, head_num: int, layout: str) -> tuple[int, ...]:
    """Validate the three tensors against the layout; returns their numbers of heads."""
    tensors = query, key, value
    require(layout in _RANK, op, f"input_layout must be one of {', '.join(_RANK)}, got {layout!r}.")
    require(
        query.dtype == key.dtype == value.dtype,
        op,
        f"query, key and value must have one dtype, got {query.dtype}, {key.dtype}, {value.dtype}.",
    )
    floating(op, query=query)
    require(
        all(t.dim() == _RANK[layout] for t in tensors),
        op,
        f"layout {layout} takes {_RANK[layout]}-dimensional tensors, got {[t.dim() for t in tensors]}.",
    )
    require(head_num > 0, op, f"head_num must be positive, got {head_num}.")
    shared = 2 if layout in ("SBH", "BSH") else -1
    require(
        key.shape[:shared] == value.shape[:shared],
        op,
        f"key {tuple(key.shape)} and value {tuple(value.shape)} may differ in the size of their heads only.",
    )
    if layout in ("SBH", "BSH"):
        require(query.shape[-1] % head_num == 0, op, f"hidden size {query.shape[-1]} is no multiple of {head_num}.")
        width = query.shape[-1] // head_num
        require(key.shape[-1] % width == 0, op, f"key's hidden size {key.shape[-1]} is no multiple of {width}.")
        kv_heads = key.shape[-1] // width
        require(value.shape[-1] % kv_heads == 0, op, f"value's hidden size is no multiple of {kv_heads} heads.")
        widths = width, width, value.shape[-1] // kv_heads
    else:
        axis = 2 if layout == "BSND" else 1
        require(query.shape[axis] == head_num, op, f"query has {query.shape[axis]} heads, head_num is {head_num}.")
        kv_heads = key.shape[axis]
        require(value.shape[axis] == kv_heads, op, f"key has {kv_heads} heads, value {value.shape[axis]}.")
        widths = query.shape[-1], key.shape[-1], value.shape[-1]
    require(kv_heads > 0 and head_num % kv_heads == 0, op, f"{head_num} heads are no multiple of {kv_heads} key heads.")
    require(widths[0] == widths[1] >= widths[2], op, f"head widths must be Dq = Dk >= Dv, got {widths}.")
    require(widths[0] <= _WIDEST, op, f"head widths must be at most {_WIDEST}, got {widths[0]}.")
    outer = [(*t.shape[: 1 if layout in ("BNSD", "BSND", "BSH") else 0],) for t in tensors]
    if layout == "SBH":
        outer = [(t.shape[1],) for t in tensors]
    require(outer[0] == outer[1] == outer[2], op, "query, key and value must have one batch size.")
    return head_num, kv_heads, kv_heads


def to_bnsd(tensor: Tensor, layout: str, heads: int) -> Tensor:
    """(B, N, S, D) view or copy of a tensor in a layout with a batch."""
    if layout in ("SBH", "BSH"):
        by_head = tensor.reshape(*tensor.shape[:2], heads, tensor.shape[-1] // heads)
        return by_head.permute(1, 2, 0, 3) if layout == "SBH" else by_head.permute(0, 2, 1, 3)
    return tensor.transpose(1, 2) if layout == "BSND" else tensor


def from_bnsd(tensor: Tensor, layout: str) -> Tensor:
    """The inverse of `to_bnsd`, contiguous."""
    if layout == "SBH":
        return tensor.permute(2, 0, 1, 3).flatten(-2).contiguous()
    if layout == "BSH":
        return tensor.permute(0, 2, 1, 3).flatten(-2).contiguous()
    return (tensor.transpose(1, 2) if layout == "BSND" else tensor).contiguous()


@dataclass(frozen=True)
class Packed:
    """Where one sequence of a TND input lies in query and in key/value."""

    query: slice
    key: slice


def sequences(op: str, ends_q: list[int] | None, ends_kv: list[int] | None, tokens_q: int, tokens_kv: int) -> Iterator[Packed]:
    """The non-empty sequences of a TND input, from running totals of lengths (token counts).

    A leading 0, as verl and Megatron pass it, is an empty first sequence; trailing zeros stand for sequences that
    take no part, as the vendor documents.
    """
    if ends_q is None or ends_kv is None:
        raise RuntimeError(f"{op}: layout TND needs actual_seq_qlen and actual_seq_kvlen.")
    require(len(ends_q) == len(ends_kv), op, "actual_seq_qlen and actual_seq_kvlen must have one length.")
    start_q = start_kv = 0
    for end_q, end_kv in zip(ends_q, ends_kv, strict=True):
        if end_q == 0 and end_kv == 0 and (start_q or start_kv):
            return
        require(end_q >= start_q and end_kv >= start_kv, op, f"running totals must not fall: {ends_q}, {ends_kv}.")
        require(
            end_q <= tokens_q and end_kv <= tokens_kv,
            op,
            f"sequences end at {end_q} and {end_kv}, but there are {tokens_q} and {tokens_kv} tokens.",
        )
        if end_q > start_q:
            yield Packed(slice(start_q, end_q), slice(start_kv, end_kv))
        start_q, start_kv = end_q, end_kv


@lru_cache(maxsize=1)
def _triangle() -> Tensor:
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool).triu(1)


def outside_band(rows: int, columns: int, before: int, after: int, shift: int) -> Tensor:
    """(rows, columns) bool: True outside `i + shift - before <= j <= i + shift + after`."""
    i, j = torch.arange(rows)[:, None] + shift, torch.arange(columns)[None]
    return (j < i - before) | (j > i + after)


@dataclass(frozen=True)
class Masking:
    """One call's mask arguments. True forbids. Without a mask the sparse mode does not count."""

    op: str
    mask: Tensor | None
    mode: int
    before: int
    after: int

    def __post_init__(self) -> None:
        if self.mode not in _MASK_MODES:
            refuse(self.op, "sparse_mode", self.mode)
        if self.mask is None:
            return
        if self.mode == 4:
            between = f"pre_tockens={self.before} and next_tockens={self.after}"
            require(self.before + self.after >= 0, self.op, f"sparse_mode 4 needs keys between {between}.")
        dtypes = torch.bool, torch.uint8
        require(self.mask.dtype in dtypes, self.op, f"atten_mask must be bool or uint8, got {self.mask.dtype}.")
        if self.mode >= 2:
            side = (_COMPRESSED, _COMPRESSED)
            require(
                self.mask.shape[-2:] == side and self.mask.numel() == _COMPRESSED**2,
                self.op,
                f"sparse_mode {self.mode} takes a compressed {side} mask, got {tuple(self.mask.shape)}.",
            )
            require(
                torch.equal(self.mask.view(side).bool(), _triangle()),
                self.op,
                f"sparse_mode {self.mode} takes the mask that forbids strictly above the diagonal.",
            )

    def _compressed(self, rows: int, columns: int) -> Tensor:
        unlimited = rows + columns
        if self.mode == 2:
            return outside_band(rows, columns, unlimited, 0, 0)
        shift = columns - rows
        if self.mode == 3:
            return outside_band(rows, columns, unlimited, 0, shift)
        return outside_band(rows, columns, self.before, self.after, shift)

    def _explicit(self, mask: Tensor) -> Tensor:
        forbidden = mask.bool()
        if self.mode == 0:
            outside = outside_band(forbidden.shape[-2], forbidden.shape[-1], self.before, self.after, 0)
            require(
                bool((forbidden | ~outside).all()),
                self.op,
                f"atten_mask allows keys beyond pre_tockens={self.before}, next_tockens={self.after}.",
            )
        return forbidden

    def block(self, batch: int, heads: int, rows: int, columns: int) -> Tensor | None:
        """Mask of a padded batch, broadcastable to (B, N, Sq, Skv)."""
        if self.mask is None:
            return None
        if self.mode >= 2:
            return self._compressed(rows, columns)
        shape, side = tuple(self.mask.shape), (rows, columns)
        allowed = [side, *((b, n, *side) for b in (1, batch) for n in (1, heads))]
        require(shape in allowed, self.op, f"atten_mask {shape} fits neither SS, 11SS, B1SS nor BNSS of {side}.")
        return self._explicit(self.mask)

    def packed(self, rows: int, columns: int) -> Tensor | None:
        """Mask of one packed sequence, (s_q, s_kv)."""
        if self.mask is None:
            return None
        if self.mode >= 2:
            return self._compressed(rows, columns)
        shape = tuple(self.mask.shape)
        require(
            len(shape) == 2 and shape[0] >= rows and shape[1] >= columns,
            self.op,
            f"layout TND takes an atten_mask (longest query, longest key), got {shape} for {(rows, columns)}.",
        )
        sentence = "layout TND takes an atten_mask that shows every row a key."
        require(not bool(self.mask.bool().all(-1).any()), self.op, sentence)
        return self._explicit(self.mask[:rows, :columns])
