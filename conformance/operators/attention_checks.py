"""What must hold of fusion attention: values, statistics, gradients, members alone, junk where nobody looks, rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from conformance.operators.attention import (
    AttentionCase,
    allowed,
    arguments,
    call_operator,
    explicit_mask,
    inputs_of,
    joined,
    magnitudes,
    members,
    plain,
    rows_of,
    rows_operator,
)
from conformance.operators.gradients import Names, check_dtypes, compare, weights_for
from conformance.operators.surface import Surface
from conformance.operators.tolerance import Quantity, exact

STATISTICS = "softmax maximum", "softmax sum"
#: What is written where no query looks: finite, and large enough to show.
JUNK = 3e4
NAMES = Names(("query", "key", "value"), ("output", *STATISTICS), float32=STATISTICS)


def check_forward(case: AttentionCase, surface: Surface) -> list[Quantity]:
    """Values and statistics; statistics give the output back; members by themselves; junk where nobody looks; rings."""
    inputs = inputs_of(case, surface)
    same = [x.cpu for x in inputs]
    sizes = magnitudes(case, same, None)
    terms = {name: max(case.keys) for name in NAMES.outputs}
    call = rows_operator(case, surface)
    quantities = compare(call, plain(case), inputs, NAMES, seed=case.seed, differentiable=0, magnitudes=sizes, terms=terms)
    output, top, total = quantities
    device = [x.device for x in inputs]

    def again(name: str, got: Tensor) -> Quantity:
        return replace(output, name=name, got=got.cpu())

    # A rounding of the maximum is absolute, and an error in an exponent is relative to what comes of it.
    loose = sizes["output"] * (1 + sizes["softmax maximum"])
    rebuilt = again("output rebuilt from the statistics", _rebuilt(case, same, top.got, total.got))
    quantities.append(replace(rebuilt, magnitude=loose))
    if case.packed and len(case.queries) > 1:
        quantities.append(again("output of the members one by one", _one_by_one(case, surface, device)))
    if case.packed and case.tail:
        changed = [x.cpu().clone() for x in device]
        for tensor, lengths in zip(changed, (case.queries, case.keys, case.keys), strict=True):
            tensor[sum(lengths) :] = JUNK
        after = call_operator(case, surface, *(surface.put(x) for x in changed))[0].cpu()
        end = sum(case.queries)
        exact("output with junk in the tail", after[:end], output.got[:end])
    if case.mask == "padding":
        exact("output with junk in hidden keys", _with_junk_keys(case, surface, same), output.got)
    for blocks in (2, 4):
        if _can_ring(case, blocks):
            merged = ring(case, surface, device, blocks)
            quantities.append(again(f"output merged from {blocks} blocks of keys", merged[0]))
            for whole, part in zip((top, total), merged[1:], strict=False):
                name = f"{whole.name} merged from {blocks} blocks of keys"
                quantities.append(replace(whole, name=name, got=rows_of(part, case)))
    if _can_ring_causally(case):
        quantities.append(_causal_ring(case, surface, device, output))
    return quantities


def _rebuilt(case: AttentionCase, tensors: Sequence[Tensor], top: Tensor, total: Tensor) -> Tensor:
    """exp(scores - maximum) / sum times value, in float64, with the operator's statistics."""
    q, k, v = (t.double() for t in tensors)
    share, start, outputs = case.heads // case.kv_heads, 0, []
    qs = members(q, case.layout, case.queries, case.heads)
    ks, vs = (members(t, case.layout, case.keys, case.kv_heads) for t in (k, v))
    for m, (a, b, c) in enumerate(zip(qs, ks, vs, strict=True)):
        rows = slice(start, start + a.shape[1])
        start = rows.stop
        high, whole = (s[rows].T[..., None].double() for s in (top, total))
        scores = a @ b.repeat_interleave(share, 0).transpose(1, 2) * case.scale
        weights = torch.exp(scores - high) * allowed(case, m) / torch.where(whole == 0, 1.0, whole)
        outputs.append(weights @ c.repeat_interleave(share, 0))
    return joined(outputs, case)


def _one_by_one(case: AttentionCase, surface: Surface, device: Sequence[Tensor]) -> Tensor:
    """The operator on each member of a packed batch alone."""
    outputs = []
    for m, (n_q, n_k) in enumerate(zip(case.queries, case.keys, strict=True)):
        alone = replace(case, queries=(n_q,), keys=(n_k,), tail=0, leading_zero=False)
        at_q, at_k = sum(case.queries[:m]), sum(case.keys[:m])
        options = arguments(case, surface) | {"actual_seq_qlen": [n_q], "actual_seq_kvlen": [n_k]}
        if case.mask not in ("none", "triangle"):  # as large as the longest member, which is now this one
            options["atten_mask"] = options["atten_mask"][:n_q, :n_k]
        q, k, v = device[0][at_q : at_q + n_q], device[1][at_k : at_k + n_k], device[2][at_k : at_k + n_k]
        if not n_q:
            continue
        out = torch.ops.npu.npu_fusion_attention(q, k, v, alone.heads, "TND", scale=case.scale, **options)[0]
        outputs.append(out.cpu())
    rest = torch.zeros(case.tail, case.heads, case.value_width, dtype=device[0].dtype)
    return torch.cat([*outputs, rest])


def _with_junk_keys(case: AttentionCase, surface: Surface, tensors: Sequence[Tensor]) -> Tensor:
    hidden = explicit_mask(case)[0, 0, 0] if max(case.queries) else torch.zeros(max(case.keys), dtype=torch.bool)
    changed = [tensors[0], *(t.clone() for t in tensors[1:])]
    for tensor in changed[1:]:
        for member in members(tensor, case.layout, case.keys, case.kv_heads):
            member[:, hidden[: member.shape[1]]] = JUNK
    return call_operator(case, surface, *(surface.put(t) for t in changed))[0].cpu()


def _can_ring(case: AttentionCase, blocks: int) -> bool:
    """Blocks of keys need a layout whose keys lie along one dimension, and a mask that is one for the whole batch."""
    if min(case.keys) < blocks:
        return False
    if case.packed:
        return case.mask == "none" and not case.tail and min(case.queries) > 0
    return case.layout in ("BNSD", "SBH") and (case.mask in ("none", "triangle") or case.mask_form == "SS")


@dataclass(frozen=True)
class _Block:
    """A part of every member's keys: where they lie along `axis`, and the call's arguments for them alone."""

    axis: int
    positions: Tensor
    options: dict[str, Any]

    def of(self, tensor: Tensor) -> Tensor:
        return tensor.index_select(self.axis, self.positions.to(tensor.device))


def _blocks(case: AttentionCase, surface: Surface, blocks: int) -> list[_Block]:
    if case.packed:
        starts = [end - n for end, n in zip(accumulate(case.keys), case.keys, strict=True)]
        chunks = [(start + torch.arange(n)).tensor_split(blocks) for start, n in zip(starts, case.keys, strict=True)]
        parts = [[chunk[b] for chunk in chunks] for b in range(blocks)]
        ends = {"actual_seq_qlen": list(accumulate(case.queries))}
        return [_Block(0, torch.cat(p), ends | {"actual_seq_kvlen": list(accumulate(len(c) for c in p))}) for p in parts]
    axis, forbidden = 2 if case.layout == "BNSD" else 0, ~allowed(case, 0)[0]
    cuts = torch.arange(case.keys[0]).tensor_split(blocks)
    masks = [surface.put(forbidden[:, cut].contiguous()) for cut in cuts]
    # A block of keys may have none for some queries.
    options = {"sparse_mode": 1, "inner_precise": 2}
    return [_Block(axis, cut, options | {"atten_mask": mask}) for cut, mask in zip(cuts, masks, strict=True)]


def ring(case: AttentionCase, surface: Surface, device: Sequence[Tensor], blocks: int) -> list[Tensor]:
    """Attention block by block, merged by the statistics: with MindSpeed's kernel where it can be had, else here.

    The output; from the kernel the merged statistics too.
    """
    q, k, v = device
    pieces = [
        torch.ops.npu.npu_fusion_attention(q, b.of(k), b.of(v), case.heads, case.layout, scale=case.scale, **b.options)[:3]
        for b in _blocks(case, surface, blocks)
    ]
    return _merged(case, surface, pieces, rows_without_keys=case.mask != "none")


def _merged(
    case: AttentionCase, surface: Surface, pieces: Sequence[Sequence[Tensor]], *, rows_without_keys: bool
) -> list[Tensor]:
    kernel = surface.kernels.get("npu_ring_attention_update")
    if kernel is not None and case.layout in ("SBH", "TND") and not rows_without_keys:
        merged, ends = pieces[0], torch.tensor([0, *accumulate(case.queries)]) if case.packed else None
        for piece in pieces[1:]:
            merged = kernel.npu_ring_attention_update(*merged, *piece, ends, case.layout)
        return [t.detach() for t in merged]
    tops, totals = ([rows_of(p[i].detach(), case).double() for p in pieces] for i in (1, 2))
    top = torch.stack(tops).amax(0)
    shares = [total * torch.exp(high - top) for high, total in zip(tops, totals, strict=True)]
    whole = torch.stack(shares).sum(0)
    whole = torch.where(whole == 0, 1.0, whole)
    merged_members: list[Tensor] = []
    for piece, share in zip(pieces, shares, strict=True):
        outs = members(piece[0].detach().cpu().double(), case.layout, case.queries, case.heads)
        parts = torch.split(share / whole, list(case.queries))  # each (s, N)
        weighted = [out * part.T[..., None] for out, part in zip(outs, parts, strict=True)]
        merged_members = [a + b for a, b in zip(merged_members, weighted, strict=True)] if merged_members else weighted
    return [joined(merged_members, case)]


def _can_ring_causally(case: AttentionCase) -> bool:
    square = case.queries == case.keys and case.queries[0] > 1 and case.queries[0] % 2 == 0
    return square and case.layout in ("BNSD", "SBH") and case.mode == 3 and case.mask == "triangle"


def _causal_ring(case: AttentionCase, surface: Surface, device: Sequence[Tensor], output: Quantity) -> Quantity:
    """The last half of the queries as rings have it: all of the first half of the keys, then the triangle of their own."""
    axis, half = 2 if case.layout == "BNSD" else 0, case.queries[0] // 2
    lengths = (half,) * len(case.queries)
    part = replace(case, queries=lengths, keys=lengths)
    first, last = ([t.narrow(axis, start, half) for t in device] for start in (0, half))
    own = arguments(part, surface)
    pieces = [
        torch.ops.npu.npu_fusion_attention(last[0], *keys, case.heads, case.layout, scale=case.scale, **options)[:3]
        for keys, options in ((first[1:], {}), (last[1:], own))
    ]
    merged = _merged(part, surface, pieces, rows_without_keys=False)[0].cpu()
    truth, rough = (t.narrow(axis, half, half) for t in (output.truth, output.plain))
    return replace(output, name="output of a causal ring", got=merged, truth=truth, plain=rough)


def check_backward(case: AttentionCase, surface: Surface) -> list[Quantity]:
    """Gradients by autograd through the operator, and block by block with the whole's statistics, as rings do it."""
    inputs = inputs_of(case, surface)
    same, device = [x.cpu for x in inputs], [x.device for x in inputs]
    with torch.no_grad():
        (weight,) = weights_for(plain(case)(*(x.double() for x in same))[:1], same[0].dtype, case.seed, case.incoming)
    sizes = magnitudes(case, same, weight)
    terms = {f"gradient of {n}": max(*case.keys, *case.queries) for n in NAMES.inputs} | {"output": max(case.keys)}
    call = rows_operator(case, surface)

    def attention_only(function: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
        return lambda *tensors: function(*tensors)[:1]

    quantities = compare(
        attention_only(call),
        attention_only(plain(case)),
        inputs,
        Names(NAMES.inputs, ("output",)),
        seed=case.seed,
        incoming=case.incoming,
        magnitudes=sizes,
        terms=terms,
    )
    by_itself = _gradients(case, surface, device, weight)
    check_dtypes(NAMES.inputs, by_itself, [x.dtype for x in same])
    for blocks in (2, 4):
        if _can_ring(case, blocks):
            quantities += _ring_backward(case, surface, device, weight, blocks, quantities)
    return quantities


def _gradients(case: AttentionCase, surface: Surface, device: Sequence[Tensor], weight: Tensor) -> list[Tensor]:
    """Gradients of query, key and value by the backward operator itself."""
    out, top, total, *_ = call_operator(case, surface, *device)
    grads = torch.ops.npu.npu_fusion_attention_grad(
        *(*device, surface.put(weight), case.heads, case.layout),
        softmax_max=top,
        softmax_sum=total,
        attention_in=out,
        scale_value=case.scale,
        **arguments(case, surface),
    )
    return list(grads[:3])


def _ring_backward(
    case: AttentionCase,
    surface: Surface,
    device: Sequence[Tensor],
    weight: Tensor,
    blocks: int,
    quantities: Sequence[Quantity],
) -> list[Quantity]:
    q, k, v = device
    out, top, total, *_ = call_operator(case, surface, *device)
    totals = [torch.zeros(t.shape, dtype=torch.float64) for t in device]
    for b in _blocks(case, surface, blocks):
        grads = torch.ops.npu.npu_fusion_attention_grad(
            *(q, b.of(k), b.of(v), surface.put(weight), case.heads, case.layout),
            softmax_max=top,
            softmax_sum=total,
            attention_in=out,
            scale_value=case.scale,
            **b.options,
        )
        totals[0] += grads[0].cpu()
        for whole, part in zip(totals[1:], grads[1:3], strict=True):
            whole.index_copy_(b.axis, b.positions, part.cpu().double())
    by_name = {q.name: q for q in quantities}
    return [
        replace(by_name[f"gradient of {n}"], name=f"gradient of {n} from {blocks} blocks of keys", got=g)
        for n, g in zip(NAMES.inputs, totals, strict=True)
    ]
