"""Grouped products, and products fused with a collective: cases, the truth, and what must hold beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from conformance.operators.surface import Drawn, Dtype, Surface, draw, normal
from conformance.operators.tolerance import Quantity, must


@dataclass(frozen=True)
class GroupedCase:
    """`counts` rows of x for each expert. `group_type` 0 groups the rows, 2 the contraction (the weight's gradient).

    What the vendor takes: float32 as one weight, except in the overload with a `list`; that one as several weights, with
    `group_type` 0, running totals that rise, and alone `split_item` 1. Counts of more than one group. A float32 bias for
    bfloat16. `strides` is the memory of the weights with `group_type` 0: x may not be transposed there, and must be with 2.
    """

    counts: tuple[int, ...]
    inner: int
    outer: int
    dtype: Dtype
    group_type: Literal[0, 2] = 0
    totals: bool = False
    one_weight: bool = True
    split_item: Literal[1, 2, 3] = 3
    with_bias: bool = False
    entry: Literal["operator", "list", "kernel"] = "operator"
    strides: Literal["contiguous", "transposed"] = "contiguous"
    seed: int = 0


def expert_of_row(counts: Sequence[int]) -> Tensor:
    """The expert of each row."""
    return torch.tensor([e for e, n in enumerate(counts) for _ in range(n)], dtype=torch.int64)


def _grouped(case: GroupedCase, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Plainly: every row with its own expert's matrix; or, grouped by contraction, a masked product for each expert."""
    expert = expert_of_row(case.counts)
    if case.group_type == 0:
        out = torch.bmm(x[:, None], w[expert])[:, 0]
        return out if bias is None else out + bias[expert]
    member = (expert[None] == torch.arange(len(case.counts))[:, None]).to(x.dtype)  # (E, T)
    return torch.matmul(x.T[None] * member[:, None], w[None])


def check_grouped(case: GroupedCase, surface: Surface) -> list[Quantity]:
    """The product, and in the same case what MindSpeed's backward asks for."""
    rows, experts = sum(case.counts), len(case.counts)
    x = draw(surface, (rows, case.inner), case.dtype, "contiguous", case.seed)
    if case.group_type == 0:
        w = draw(surface, (experts, case.inner, case.outer), case.dtype, case.strides, case.seed + 1)
    else:
        w = draw(surface, (rows, case.outer), case.dtype, "contiguous", case.seed + 1)
    bias = None
    if case.with_bias and case.group_type == 0:
        kind: Dtype = "float32" if case.dtype == "bfloat16" else case.dtype
        bias = draw(surface, (experts, case.outer), kind, "contiguous", case.seed + 2)
    got = _call(case, surface, x, w, bias)
    values = [t.cpu for t in (x, w, bias) if t is not None]

    def reference(*tensors: Tensor) -> Tensor:
        return _grouped(case, *tensors) if len(tensors) > 2 else _grouped(case, *tensors, None)  # type: ignore[call-arg]

    truth = reference(*(t.double() for t in values))
    absolute = reference(*(t.double().abs() for t in values))
    terms = case.inner if case.group_type == 0 else max(case.counts)
    must(got.dtype == x.cpu.dtype, f"output: dtype {got.dtype}, must be {x.cpu.dtype}")
    size, rough = _size(truth, absolute, terms, x.cpu.dtype), reference(*values).to(x.cpu.dtype)
    quantities = [Quantity("output", got, truth, rough, x.cpu.dtype, size)]
    if surface.kernels and case.group_type == 2:
        quantities.append(_accumulated(case, surface, x, w, truth, absolute))
    return quantities


def _size(product: Tensor, absolute: Tensor, inner: int, dtype: torch.dtype) -> Tensor:
    """Magnitude of a product: it is rounded to the dtype once. What it is a sum of multiplies exactly and is summed in
    float32, where the `absolute` sum of `inner` terms bounds the rounding."""
    sums = torch.finfo(torch.float32).eps * math.sqrt(inner) / torch.finfo(dtype).eps
    return product.abs() + absolute * sums


def _group_list(case: GroupedCase) -> list[int]:
    return list(accumulate(case.counts)) if case.totals else list(case.counts)


def _call(case: GroupedCase, surface: Surface, x: Drawn, w: Drawn, bias: Drawn | None) -> Tensor:
    left = x.device.T if case.group_type == 2 else x.device
    weights = [w.device] if case.one_weight or case.group_type == 2 else list(w.device)
    biases = None if bias is None else list(bias.device)
    kind = 0 if case.totals else 1
    numbers = torch.tensor(_group_list(case), dtype=torch.int64)
    if case.entry == "kernel":
        parts = surface.kernels["grouped_matmul_v2"].npu_gmm([left], weights, biases or [], numbers, case.group_type, kind)
        return parts[0].cpu()  # type: ignore[no-any-return]
    options: dict[str, Any] = {"bias": biases, "split_item": case.split_item}
    if case.entry == "list":
        options["group_list"] = list(accumulate(case.counts))
    else:
        options |= {"group_list": surface.put(numbers), "group_list_type": kind, "group_type": case.group_type}
    parts = torch.ops.npu.npu_grouped_matmul([left], weights, **options)
    must(len(parts) == (1 if case.split_item in (2, 3) else len(case.counts)), f"{len(parts)} outputs")
    if case.split_item == 1:
        must([len(p) for p in parts] == list(case.counts), "rows of each group")
    return torch.cat([p.cpu() for p in parts])


def _accumulated(case: GroupedCase, surface: Surface, x: Drawn, w: Drawn, truth: Tensor, size: Tensor) -> Quantity:
    """MindSpeed's kernel that adds the weight's gradient to a float32 accumulator, here one of ones."""
    total = surface.put(torch.ones(truth.shape))
    ends = surface.put(torch.tensor(list(accumulate(case.counts)), dtype=torch.int64))
    surface.kernels["npu_groupmatmul_add_fp32"].npu_groupmatmul_add_fp32(x.device, w.device, ends, total)
    rough = (truth + 1).float()
    return Quantity("accumulated gradient", total.cpu(), truth + 1, rough, torch.float32, size + 1, max(case.counts))


@dataclass(frozen=True)
class CollectiveCase:
    """Each rank has `rows` (times the ranks, to be scattered) by `inner` numbers and a matrix of its own.

    What the vendor takes: `inner` from 256 and below 65535 (any, for the sum that all ranks get), operands that are not
    empty, and no float32. `strides` is the memory of the matrix: the left operand may not be transposed. `batch`: the left
    operand of the sum that all ranks get is (batch, rows, inner).
    """

    rows: int
    inner: int
    outer: int
    dtype: Literal["bfloat16", "float16"]
    with_bias: bool = False
    gather_output: bool = True
    strides: Literal["contiguous", "transposed"] = "contiguous"
    batch: int | None = None
    seed: int = 0


def _everyones(case: CollectiveCase, surface: Surface, ranks: int, rows: int) -> list[tuple[Drawn, Drawn]]:
    """Every rank's operands: each rank can draw them all."""
    return [
        (
            draw(surface, (rows, case.inner), case.dtype, "contiguous", case.seed + 10 * r),
            draw(surface, (case.inner, case.outer), case.dtype, case.strides, case.seed + 10 * r + 5),
        )
        for r in range(ranks)
    ]


def _bias(case: CollectiveCase, rank: int) -> Tensor:
    return normal((case.outer,), case.dtype, case.seed + 300 + rank)


def check_all_gather(case: CollectiveCase, surface: Surface, rank: int, ranks: int) -> list[Quantity]:
    """The product of everyone's rows with this rank's matrix, and everyone's rows."""
    operands = _everyones(case, surface, ranks, case.rows)
    x, w = operands[rank]
    product, gathered = torch.ops.npu.npu_all_gather_base_mm(
        x.device, w.device, surface.communicator, ranks, gather_output=case.gather_output
    )
    rows = torch.cat([o[0].cpu for o in operands])
    if case.gather_output:
        must(torch.equal(gathered.cpu(), rows), "gathered rows: not every rank's rows in rank order")
    else:
        must(gathered.numel() == 0, f"gathered rows: {gathered.numel()} numbers, asked for none")
    must(product.dtype == x.cpu.dtype, f"product: dtype {product.dtype}, must be {x.cpu.dtype}")
    a, b = rows.double(), w.cpu.double()
    size = _size(a @ b, a.abs() @ b.abs(), case.inner, x.cpu.dtype)
    return [Quantity("product", product.cpu(), a @ b, rows @ w.cpu, x.cpu.dtype, size)]


def _summed(case: CollectiveCase, operands: Sequence[tuple[Drawn, Drawn]], biased: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Truth, plain and magnitude of the sum over ranks of each rank's product (and bias), which is rounded by itself."""
    truth, rough, size = None, None, None
    for rank, (x, w) in enumerate(operands):
        bias = _bias(case, rank)
        a, b, c = x.cpu.double(), w.cpu.double(), bias.double() * biased
        exactly, absolute = a @ b + c, a.abs() @ b.abs() + c.abs()
        here = exactly, x.cpu @ w.cpu + bias * biased, _size(exactly, absolute, case.inner, x.cpu.dtype)
        truth = here[0] if truth is None else truth + here[0]
        rough = here[1] if rough is None else rough + here[1]
        size = here[2] if size is None else size + here[2]
    assert truth is not None
    assert rough is not None
    assert size is not None
    return truth, rough, size


def check_reduce_scatter(case: CollectiveCase, surface: Surface, rank: int, ranks: int) -> list[Quantity]:
    """This rank's rows of the sum of everyone's products."""
    operands = _everyones(case, surface, ranks, case.rows * ranks)
    x, w = operands[rank]
    got = torch.ops.npu.npu_mm_reduce_scatter_base(x.device, w.device, surface.communicator, ranks, reduce_op="sum").cpu()
    mine = slice(rank * case.rows, (rank + 1) * case.rows)
    truth, rough, size = _summed(case, operands, False)
    must(got.dtype == x.cpu.dtype, f"product: dtype {got.dtype}, must be {x.cpu.dtype}")
    return [Quantity("product", got, truth[mine], rough[mine], x.cpu.dtype, size[mine], ranks)]


def check_all_reduce(case: CollectiveCase, surface: Surface, rank: int, ranks: int) -> list[Quantity]:
    """The sum of everyone's products and biases."""
    operands = _everyones(case, surface, ranks, case.rows * (case.batch or 1))
    x, w = operands[rank]
    bias = surface.put(_bias(case, rank)) if case.with_bias else None
    left = x.device if case.batch is None else x.device.view(case.batch, case.rows, case.inner)
    got = torch.ops.npu.npu_mm_all_reduce_base(left, w.device, surface.communicator, reduce_op="sum", bias=bias).cpu()
    truth, rough, size = (t.view(*left.shape[:-1], case.outer) for t in _summed(case, operands, case.with_bias))
    must(got.dtype == x.cpu.dtype, f"product: dtype {got.dtype}, must be {x.cpu.dtype}")
    return [Quantity("product", got, truth, rough, x.cpu.dtype, size, ranks)]
