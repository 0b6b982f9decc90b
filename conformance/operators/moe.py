"""MoE permutation and its undoing, by expert indices, by routing map, and with drop-and-pad.

The truth sorts Python lists of (expert, token) pairs. Moving tokens rounds nothing, so values must be exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from conformance.operators.gradients import Names, check_dtypes, compare
from conformance.operators.surface import Drawn, Dtype, Strides, Surface, draw, lay_out, whole
from conformance.operators.tolerance import Quantity, exact, must

#: `random`; `few`: half of the experts get nothing; `one`: one expert takes every token's first choice; `tied`: all tokens
#: choose alike; `twice`: a token may choose an expert more than once (expert indices only).
Routing = Literal["random", "few", "one", "tied", "twice"]


Entry = Literal["indices", "routing_map", "drop_and_pad"]


@dataclass(frozen=True)
class MoeCase:
    """`tokens` tokens of `hidden` numbers go to `chosen` of `experts` experts each.

    `dropped`: rows cut from the end, by their number or, `from_the_end`, by a negative one (permutation by indices only).
    `capacity`: rows of each expert (drop_and_pad only). `narrow`: int32 indices, or an int8 map, for int64 and bool.
    `others`: the memory of indices, map and probs, `incoming`: that of the outputs' gradients.
    """

    entry: Entry
    tokens: int
    hidden: int
    experts: int
    chosen: int
    dtype: Dtype
    routing: Routing = "random"
    with_probs: bool = True
    flat: bool = False
    dropped: int = 0
    from_the_end: bool = False
    capacity: int = 1
    narrow: bool = False
    strides: Strides = "contiguous"
    others: Literal["contiguous", "sliced", "transposed"] = "contiguous"
    incoming: Strides = "contiguous"
    seed: int = 0


def choices(case: MoeCase) -> list[list[int]]:
    """Each token's experts. Rising for a map, which has no order; as drawn for indices."""
    pool = list(range(0, case.experts, 2)) if case.routing == "few" else list(range(case.experts))
    if len(pool) < case.chosen:
        pool = list(range(case.experts))
    drawn = whole((max(case.tokens, 1), 64), 0, 1 << 30, case.seed + 5).tolist()
    found: list[list[int]] = []
    for token in range(case.tokens):
        numbers = drawn[0 if case.routing == "tied" else token]
        if case.routing == "twice" and case.entry == "indices":
            found.append([pool[n % len(pool)] for n in numbers[: case.chosen]])
            continue
        ranked = sorted(pool, key=lambda e: numbers[e])
        if case.routing == "one":
            ranked.remove(pool[-1])
            ranked.insert(0, pool[-1])
        found.append(ranked[: case.chosen])
    return found if case.entry == "indices" else [sorted(f) for f in found]


def slots(case: MoeCase) -> list[tuple[int, int, int]]:
    """(token, choice, expert) of each permuted row."""
    chosen = choices(case)
    pairs = [(expert, token, choice) for token, experts in enumerate(chosen) for choice, expert in enumerate(experts)]
    if case.entry == "drop_and_pad":
        rows = []
        for expert in range(case.experts):
            takers = [token for token in range(case.tokens) if expert in chosen[token]]
            others = [token for token in range(case.tokens) if expert not in chosen[token]]
            rows += [(token, -1, expert) for token in (takers + others)[: case.capacity]]
        return rows
    # Stable: within an expert, in the order of (token, choice).
    ordered = sorted(pairs, key=lambda p: p[0])
    kept = ordered[: len(ordered) - case.dropped] if case.dropped else ordered
    return [(token, choice, expert) for expert, token, choice in kept]


def routing_map(case: MoeCase) -> Tensor:
    """(tokens, experts) bool."""
    chosen = torch.zeros(case.tokens, case.experts, dtype=torch.bool)
    for token, experts in enumerate(choices(case)):
        chosen[token, experts] = True
    return chosen


def _rows(case: MoeCase) -> tuple[Tensor, Tensor]:
    """Token, and expert (or, for indices, choice) of each permuted row."""
    found = slots(case)
    second = 1 if case.entry == "indices" else 2
    return torch.tensor([s[0] for s in found], dtype=torch.int64), torch.tensor([s[second] for s in found], dtype=torch.int64)


def sorted_indices(case: MoeCase) -> Tensor:
    """What the operator must return beside the rows, int32."""
    found = slots(case)
    if case.entry == "drop_and_pad":
        return torch.tensor([s[0] for s in found], dtype=torch.int32)
    # Rows that were cut have their places after the kept ones.
    whole_list = slots(replace(case, dropped=0))
    place = {(token, choice): row for row, (token, choice, _) in enumerate(whole_list)}
    order = [place[token, choice] for token, experts in enumerate(choices(case)) for choice in range(len(experts))]
    return torch.tensor(order, dtype=torch.int32)


def _indices(case: MoeCase, surface: Surface) -> Tensor:
    """Expert numbers, (tokens, chosen) or, `flat`, (tokens,), on the device."""
    indices = torch.tensor(choices(case), dtype=torch.int32 if case.narrow else torch.int64).reshape(case.tokens, case.chosen)
    return lay_out(indices[:, 0] if case.flat and case.chosen == 1 else indices, case.others, surface)


def _map(case: MoeCase, surface: Surface) -> Tensor:
    """The routing map on the device."""
    return lay_out(routing_map(case).to(torch.int8 if case.narrow else torch.bool), case.others, surface)


def permute(case: MoeCase, surface: Surface, tokens: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """The operator under test: permuted tokens, permuted probs, sorted indices."""
    if case.entry == "indices":
        kept = -case.dropped if case.from_the_end else case.tokens * case.chosen - case.dropped
        out, order = torch.ops.npu.npu_moe_token_permute(tokens, _indices(case, surface), kept if case.dropped else None)
        return out, None, order
    pad = case.entry == "drop_and_pad"
    rows = case.experts * case.capacity if pad else case.tokens * case.chosen
    result: tuple[Tensor, Tensor | None, Tensor] = torch.ops.npu.npu_moe_token_permute_with_routing_map(
        tokens, _map(case, surface), probs=probs, num_out_tokens=rows, drop_and_pad=pad
    )
    return result


def unpermute(case: MoeCase, surface: Surface, rows: Tensor, order: Tensor, probs: Tensor | None) -> Tensor:
    """The operator that undoes it."""
    if case.entry == "indices":
        out: Tensor = torch.ops.npu.npu_moe_token_unpermute(rows, order, probs)
        return out
    pad = case.entry == "drop_and_pad"
    options = {"probs": probs, "routing_map": None if probs is None else _map(case, surface), "drop_and_pad": pad}
    restored: Tensor = torch.ops.npu.npu_moe_token_unpermute_with_routing_map(rows, order, [case.tokens, case.hidden], **options)
    return restored


def _probs(case: MoeCase, surface: Surface) -> Drawn:
    columns = case.chosen if case.entry == "indices" else case.experts
    return draw(surface, (case.tokens, columns), case.dtype, case.others, case.seed + 1)


def check_permute(case: MoeCase, surface: Surface) -> list[Quantity]:
    """Rows exact; gradients; permute then unpermute gives the tokens back."""
    tokens = draw(surface, (case.tokens, case.hidden), case.dtype, case.strides, case.seed)
    token_of, expert_of = _rows(case)
    with_probs = case.with_probs and case.entry != "indices"
    inputs, names, dtype = [tokens], ["tokens"], tokens.cpu.dtype
    if with_probs:
        inputs.append(_probs(case, surface))
        names.append("probs")

    def operator(t: Tensor, *probs: Tensor) -> list[Tensor]:
        out, picked, _ = permute(case, surface, t, probs[0] if probs else None)
        must((picked is None) == (not probs), "permuted probs must be there if and only if probs are")
        return [out] if picked is None else [out, picked]

    def plainly(t: Tensor, *probs: Tensor) -> list[Tensor]:
        return [t[token_of], *(p[token_of, expert_of] for p in probs)]

    outputs = ("permuted tokens", "permuted probs")[: len(inputs)]
    copies = case.chosen if case.entry != "drop_and_pad" else case.experts
    quantities = compare(
        operator,
        plainly,
        inputs,
        Names(tuple(names), outputs),
        seed=case.seed,
        incoming=case.incoming,
        differentiable=len(inputs) if case.tokens else 0,
        magnitudes={"gradient of tokens": torch.tensor(4.0 * copies, dtype=torch.float64)},
    )
    for name, drawn, q in zip(outputs, plainly(*(x.cpu for x in inputs)), quantities, strict=False):
        exact(name, q.got, drawn)
    out, _, order = permute(case, surface, tokens.device, inputs[1].device if with_probs else None)
    exact("sorted indices", order.cpu(), sorted_indices(case))
    if not case.tokens:  # the vendor takes no tokens forward, and says nothing of the way back
        return quantities
    sent = [torch.ones_like(q.got).to(order.device) for q in quantities[: len(inputs)]]
    check_dtypes(names, _permute_backward(case, surface, tokens.device, sent, order), [dtype] * len(inputs))
    if case.entry != "drop_and_pad" and not case.dropped:
        exact("tokens after permute and unpermute", _back(case, surface, out, order), tokens.cpu)
    return quantities


def _permute_backward(case: MoeCase, surface: Surface, tokens: Tensor, sent: list[Tensor], order: Tensor) -> list[Tensor]:
    """Gradients of tokens (and probs) by the backward operator itself."""
    if case.entry == "indices":
        return [torch.ops.npu.npu_moe_token_permute_grad(tokens, sent[0], _indices(case, surface), order)]
    grads = torch.ops.npu.npu_moe_token_permute_with_routing_map_grad(
        *(sent[0], sent[1] if len(sent) > 1 else None, order, _map(case, surface)),
        *(case.experts, case.tokens, case.entry == "drop_and_pad"),
    )
    return list(grads[: len(sent)])


def _unpermute_backward(case: MoeCase, surface: Surface, order: Tensor, rows: Tensor, probs: Tensor | None) -> list[Tensor]:
    """Gradients of rows (and probs) by the backward operator itself."""
    sent, count = torch.ones_like(rows[:1]).expand(case.tokens, case.hidden).contiguous(), 1 if probs is None else 2
    if case.entry == "indices":
        return list(torch.ops.npu.npu_moe_token_unpermute_grad(rows, sent, order, probs)[:count])
    pad, index, ids = case.entry == "drop_and_pad", order, order
    if pad:  # as the vendor documents the forward operator's other outputs
        ids, index = order.sort(stable=True)
    given = (None, None) if probs is None else (_map(case, surface), rows)
    grads = torch.ops.npu.npu_moe_token_unpermute_with_routing_map_grad(
        *(sent, index.to(torch.int32), ids, *given, probs, pad, [case.tokens, case.hidden])
    )
    return list(grads[:count])


def _back(case: MoeCase, surface: Surface, rows: Tensor, order: Tensor) -> Tensor:
    """Unpermute with weight 1 for each token's first choice and 0 for the others."""
    columns = case.chosen if case.entry == "indices" else case.experts
    ones = torch.zeros(case.tokens, columns, dtype=rows.dtype)
    for token, experts in enumerate(choices(case)):
        ones[token, 0 if case.entry == "indices" else experts[0]] = 1
    return unpermute(case, surface, rows, order, surface.put(ones)).cpu()


def check_unpermute(case: MoeCase, surface: Surface) -> list[Quantity]:
    """Weighted sums of each token's rows, and gradients of rows and weights."""
    token_of, second = _rows(case)
    count = len(token_of)
    rows = draw(surface, (count, case.hidden), case.dtype, case.strides, case.seed)
    order = surface.put(sorted_indices(case))
    with_probs = case.with_probs or (case.entry == "indices" and case.chosen > 1)
    inputs = [rows, _probs(case, surface)] if with_probs else [rows]

    def operator(r: Tensor, *probs: Tensor) -> list[Tensor]:
        return [unpermute(case, surface, r, order, probs[0] if probs else None)]

    def plainly(r: Tensor, *probs: Tensor) -> list[Tensor]:
        weighted = r * probs[0][token_of, second][:, None] if probs else r
        sums = [weighted[token_of == token].sum(0) for token in range(case.tokens)]
        return [torch.stack(sums) if sums else weighted[:0]]

    copies = max(case.experts, case.chosen)
    top = 1.0 if not with_probs or not inputs[1].cpu.numel() else float(inputs[1].cpu.double().abs().amax())
    high = float(rows.cpu.double().abs().amax()) if rows.cpu.numel() else 1.0
    fixed: dict[str, Any] = {
        "output": high * top,
        "gradient of rows": 4 * top,
        "gradient of probs": 4 * high * max(case.hidden, 1) ** 0.5,
    }
    names = Names(("rows", "probs")[: len(inputs)], ("output",))
    sizes = {name: torch.tensor(value, dtype=torch.float64) for name, value in fixed.items()}
    quantities = compare(
        operator, plainly, inputs, names, seed=case.seed, incoming=case.incoming, magnitudes=sizes, terms={"output": copies}
    )
    given = [x.device for x in inputs]
    back = _unpermute_backward(case, surface, order, given[0], given[1] if with_probs else None)
    check_dtypes(names.inputs, back, [rows.cpu.dtype] * len(inputs))
    return quantities
