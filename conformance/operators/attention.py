"""Fusion attention: cases, how the operator is called, and the truth.

The truth goes member by member and head by head, with the visible keys as a predicate on positions; it has no compressed
mask, no statistics and no packed memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from conformance.operators.surface import Drawn, Dtype, Strides, Surface, draw, lay_out, normal
from conformance.operators.tolerance import must

Layout = Literal["BNSD", "BSND", "BSH", "SBH", "TND"]
#: `none`: no mask. `triangle`: the compressed 2048 x 2048 one, for modes 2, 3 and 4. The rest are explicit, for modes 0 and 1:
#: `random` hides some keys, `rows` hides all keys of some rows, `padding` hides the last keys of every row.
Mask = Literal["none", "triangle", "random", "rows", "padding"]
_SIDE = 2048


@dataclass(frozen=True)
class AttentionCase:
    """One call. `queries` and `keys` are the lengths of the batch's members, all equal unless the layout is TND.

    What the vendor takes of TND: explicit masks that show every row a key, and no fewer keys than queries with modes 3 and 4.
    `others`: the memory of an explicit mask, `incoming`: that of the output's gradient.
    """

    layout: Layout
    dtype: Dtype
    heads: int
    kv_heads: int
    width: int
    value_width: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    mode: int = 0
    mask: Mask = "none"
    mask_form: Literal["SS", "11SS", "B1SS", "BNSS"] = "SS"
    before: int = 2147483647
    after: int = 2147483647
    leading_zero: bool = False
    tail: int = 0
    scale: float = 0.5
    size: float = 1.0
    strides: Strides = "contiguous"
    others: Literal["contiguous", "sliced", "transposed"] = "contiguous"
    incoming: Strides = "contiguous"
    seed: int = 0

    @property
    def packed(self) -> bool:
        return self.layout == "TND"


def _shape(case: AttentionCase, lengths: tuple[int, ...], heads: int, width: int) -> tuple[int, ...]:
    batch, length = len(lengths), lengths[0]
    return {
        "BNSD": (batch, heads, length, width),
        "BSND": (batch, length, heads, width),
        "BSH": (batch, length, heads * width),
        "SBH": (length, batch, heads * width),
        "TND": (sum(lengths) + case.tail, heads, width),
    }[case.layout]


def inputs_of(case: AttentionCase, surface: Surface) -> list[Drawn]:
    """Query, key and value in the case's layout."""
    shapes = (
        _shape(case, case.queries, case.heads, case.width),
        _shape(case, case.keys, case.kv_heads, case.width),
        _shape(case, case.keys, case.kv_heads, case.value_width),
    )
    return [draw(surface, s, case.dtype, case.strides, 3 * case.seed + i, case.size) for i, s in enumerate(shapes)]


def members(tensor: Tensor, layout: Layout, lengths: tuple[int, ...], heads: int) -> list[Tensor]:
    """The batch's members, each (heads, length, width)."""
    if layout == "TND":
        ends = list(accumulate(lengths))
        return [tensor[end - n : end].transpose(0, 1) for n, end in zip(lengths, ends, strict=True)]
    if layout == "BNSD":
        return list(tensor.unbind(0))
    if layout == "BSND":
        return [t.transpose(0, 1) for t in tensor.unbind(0)]
    by_batch = tensor.unbind(1 if layout == "SBH" else 0)
    return [t.view(t.shape[0], heads, t.shape[1] // heads).transpose(0, 1) for t in by_batch]


def joined(parts: Sequence[Tensor], case: AttentionCase) -> Tensor:
    """The inverse of `members` for an output of the query's layout; a tail is zeros."""
    rows = [p.transpose(0, 1) for p in parts]
    if case.packed:
        return torch.cat([*rows, rows[0].new_zeros(case.tail, *rows[0].shape[1:])])
    if case.layout == "BNSD":
        return torch.stack(list(parts))
    if case.layout == "BSND":
        return torch.stack(rows)
    return torch.stack([r.flatten(1) for r in rows], 1 if case.layout == "SBH" else 0)


def explicit_mask(case: AttentionCase) -> Tensor:
    """The forbidding mask of modes 0 and 1: (B or 1, N or 1, longest query, longest key), bool, on the CPU."""
    by_batch = len(case.queries) if case.mask_form in ("B1SS", "BNSS") else 1
    by_head = case.heads if case.mask_form == "BNSS" else 1
    rows, columns = max(case.queries), max(case.keys)
    shape = (by_batch, by_head, rows, columns)
    if case.mask == "padding":
        hidden = torch.arange(columns) >= max(1, columns - columns // 3)
        return hidden.expand(shape).clone()
    forbidden = normal(shape, "float32", case.seed + 91) > 0.5
    if case.mask == "rows":
        forbidden |= (torch.arange(rows) % 3 == 1)[:, None]
    if case.mode == 0 and rows and columns:
        i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
        forbidden |= (j < i - case.before) | (j > i + case.after)
    if case.packed:
        forbidden[..., :1] = False
    return forbidden


def allowed(case: AttentionCase, member: int) -> Tensor:
    """(N or 1, s_q, s_k) bool, the keys that each query of this member sees, as the vendor's words define them."""
    rows, columns = case.queries[member], case.keys[member]
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
    if case.mask == "none":
        return torch.ones(1, rows, columns, dtype=torch.bool)
    if case.mask != "triangle":
        mask = explicit_mask(case)
        return ~mask[member if len(mask) > 1 else 0][:, :rows, :columns]
    # 2: aligned top left. 3 and 4: aligned bottom right; 4 has a band around that diagonal.
    if case.mode == 2:
        return (j <= i)[None]
    from_diagonal = (columns - j) - (rows - i)  # how far the key lies before the query's own
    if case.mode == 3:
        return (from_diagonal >= 0)[None]
    return ((from_diagonal <= case.before) & (-from_diagonal <= case.after))[None]


def _member(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output (N, s_q, D_v), maximum and sum of exponentials (N, s_q, 1) of one member, in the inputs' dtype."""
    share = q.shape[0] // k.shape[0]
    keys = torch.stack([k[h // share] for h in range(q.shape[0])])
    values = torch.stack([v[h // share] for h in range(q.shape[0])])
    scores = torch.einsum("hqd,hkd->hqk", q, keys) * scale
    if not keys.shape[1]:
        zeros = scores.new_zeros(*scores.shape[:2], 1)
        return torch.einsum("hqk,hkd->hqd", scores, values), zeros, zeros
    some = seen.any(-1, keepdim=True)
    visible = torch.where(seen, scores, -math.inf)
    probabilities = torch.softmax(torch.where(some, visible, 0.0), -1) * some
    top = torch.where(some, visible.amax(-1, keepdim=True), 0.0)
    total = torch.exp(torch.where(some, visible, -math.inf) - top).sum(-1, keepdim=True)
    return torch.einsum("hqk,hkd->hqd", probabilities, values), top, total


def plain(case: AttentionCase) -> Callable[..., list[Tensor]]:
    """Attention in plain torch on tensors of the case's layout: output, and the two statistics as (rows, heads)."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        parts = zip(
            members(q, case.layout, case.queries, case.heads),
            members(k, case.layout, case.keys, case.kv_heads),
            members(v, case.layout, case.keys, case.kv_heads),
            strict=True,
        )
        outputs = [_member(a, b, c, allowed(case, m), case.scale) for m, (a, b, c) in enumerate(parts)]
        tops, totals = (torch.cat([o[i][..., 0].T for o in outputs]) for i in (1, 2))
        return [joined([o[0] for o in outputs], case), tops, totals]

    return call


def arguments(case: AttentionCase, surface: Surface) -> dict[str, Any]:
    """The call's keyword arguments beside the tensors."""
    options: dict[str, Any] = {"sparse_mode": case.mode, "pre_tockens": case.before, "next_tockens": case.after}
    if case.mask == "triangle":
        options["atten_mask"] = surface.put(torch.ones(_SIDE, _SIDE, dtype=torch.bool).triu(1))
    elif case.mask != "none":
        mask = explicit_mask(case)
        options["atten_mask"] = lay_out(mask[0, 0] if case.mask_form == "SS" else mask, case.others, surface)
        if bool(mask.all(-1).any()):
            options["inner_precise"] = 2  # the vendor's word for: rows without a key are to be looked for
    if case.packed:
        zero = [0] if case.leading_zero else []
        options["actual_seq_qlen"] = zero + list(accumulate(case.queries))
        options["actual_seq_kvlen"] = zero + list(accumulate(case.keys))
    return options


def rows_of(statistic: Tensor, case: AttentionCase) -> Tensor:
    """The operator's softmax statistic as (rows, heads). TND lies in memory member by member as (N, s, 8)."""
    must(statistic.shape[-1] == 8, f"softmax statistic: trailing dimension {statistic.shape[-1]}, must be 8")
    must(statistic.dtype == torch.float32, f"softmax statistic: dtype {statistic.dtype}, must be float32")
    values = statistic.cpu()
    must(torch.equal(values, values[..., :1].expand_as(values)), "softmax statistic: its 8 entries must be equal")
    if not case.packed:
        return torch.cat([m[..., 0].T for m in values.unbind(0)])
    in_memory, start, parts = values[..., 0].reshape(-1), 0, []
    for length in case.queries:
        parts.append(in_memory[start : start + length * case.heads].view(case.heads, length).T)
        start += length * case.heads
    return torch.cat(parts)


def call_operator(case: AttentionCase, surface: Surface, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The seven outputs of npu_fusion_attention."""
    outputs: list[Tensor] = torch.ops.npu.npu_fusion_attention(
        q, k, v, case.heads, case.layout, scale=case.scale, **arguments(case, surface)
    )
    return outputs


def _some_key(case: AttentionCase) -> Tensor:
    """(rows, heads) bool: the query sees a key."""
    seen = [allowed(case, m).any(-1).expand(case.heads, -1).T for m in range(len(case.queries))]
    return torch.cat(seen)


def rows_operator(case: AttentionCase, surface: Surface) -> Callable[..., list[Tensor]]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out, top, total, *_ = call_operator(case, surface, q, k, v)
        seen = _some_key(case)  # the statistics of a row without keys are the kernel's own affair
        return [out, *(torch.where(seen, rows_of(s.detach(), case), 0.0) for s in (top, total))]

    return call


def magnitudes(case: AttentionCase, tensors: Sequence[Tensor], weight: Tensor | None) -> dict[str, Tensor]:
    """The same sums with every term taken absolutely, float64; gradients for the output gradient `weight`."""
    q, k, v = (t.double() for t in tensors)
    qs = members(q, case.layout, case.queries, case.heads)
    ks, vs = (members(t, case.layout, case.keys, case.kv_heads) for t in (k, v))
    share = case.heads // case.kv_heads
    dys = None if weight is None else members(weight.double(), case.layout, case.queries, case.heads)
    found: dict[str, list[Tensor]] = {n: [] for n in ("output", "top", "query", "key", "value")}
    for m, (a, b, c) in enumerate(zip(qs, ks, vs, strict=True)):
        if not b.shape[1] or not a.shape[1]:
            continue
        b, c = (t.repeat_interleave(share, 0) for t in (b, c))
        seen = allowed(case, m)
        scores = a @ b.transpose(1, 2) * case.scale
        p = torch.softmax(torch.where(seen, scores, -1e300), -1) * seen
        found["output"].append((p @ c.abs()).amax())
        found["top"].append((a.abs() @ b.abs().transpose(1, 2)).amax() * case.scale)
        if dys is None:
            continue
        # An exponential is as wrong, relatively, as its exponent is absolutely: rounded itself, and a sum of rounded terms.
        dy = dys[m].abs()
        walk = torch.sqrt((a * a) @ (b * b).transpose(1, 2)) * case.scale
        p = p * (1 + scores.abs() + walk)
        ds = p * (dy @ c.abs().transpose(1, 2) + (dy * (p @ c.abs())).sum(-1, keepdim=True)) * case.scale
        found["query"].append((ds @ b.abs()).amax())
        for name, grad in (("key", ds.transpose(1, 2) @ a.abs()), ("value", p.transpose(1, 2) @ dy)):
            found[name].append(grad.view(-1, share, *grad.shape[1:]).sum(1).amax())
    largest = {n: torch.stack(v).amax() if v else torch.zeros((), dtype=torch.float64) for n, v in found.items()}
    # The sum of exponentials inherits the rounding of its exponents.
    named = {"output": largest["output"], "softmax maximum": largest["top"]}
    named["softmax sum"] = (1 + largest["top"]) * max(*case.keys, 1)
    return named | {f"gradient of {n}": largest[n] for n in ("query", "key", "value")}
