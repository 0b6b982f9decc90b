"""npu_grouped_matmul. Not differentiable on hardware either: callers write the backward themselves."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ._checks import floating, only_defaults, refuse, require, wide
from ._registry import kernel

OP = "npu_grouped_matmul"


def _bounds(group_list: list[int], group_list_type: int, size: int) -> list[int]:
    """Group boundaries 0 .. size from counts (type 1) or running totals (type 0)."""
    if group_list_type not in (0, 1):
        refuse(OP, "group_list_type", group_list_type)
    bounds = [0]
    for entry in group_list:
        bounds.append(bounds[-1] + entry if group_list_type == 1 else entry)
    require(all(a <= b for a, b in pairwise(bounds)), OP, f"group_list {group_list} has a negative group.")
    require(bounds[-1] == size, OP, f"group_list covers {bounds[-1]} of {size} rows of the grouped dimension.")
    return bounds


def _matmul(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    require(left.dtype == right.dtype, OP, f"x is {left.dtype}, weight {right.dtype}: they must have one dtype.")
    floating(OP, x=left)
    require(left.shape[-1] == right.shape[-2], OP, f"{tuple(left.shape)} x {tuple(right.shape)} do not multiply.")
    if bias is not None:
        columns = right.shape[-1]
        require(bias.shape == (columns,), OP, f"bias must have {columns} numbers, got {tuple(bias.shape)}.")
        wanted = torch.float32 if left.dtype == torch.bfloat16 else left.dtype
        require(bias.dtype == wanted, OP, f"bias of a product in {left.dtype} must be {wanted}, got {bias.dtype}.")
    product = wide(left) @ wide(right)
    return (product if bias is None else product + wide(bias)).to(left.dtype)


def _each(x: list[Tensor], weight: list[Tensor], bias: list[Tensor] | None) -> list[Tensor]:
    require(len(x) == len(weight), OP, f"group_type -1 takes as many x as weights, got {len(x)} and {len(weight)}.")
    biases: Sequence[Tensor | None] = bias or [None] * len(x)
    return [_matmul(a, w, b) for a, w, b in zip(x, weight, biases, strict=True)]


def _rows(x: Tensor, weight: list[Tensor], bias: list[Tensor] | None, bounds: list[int]) -> list[Tensor]:
    experts = list(weight[0]) if len(weight) == 1 and weight[0].dim() == 3 else weight
    require(len(experts) == len(bounds) - 1, OP, f"{len(experts)} weights for {len(bounds) - 1} groups.")
    biases: Sequence[Tensor | None] = bias or [None] * len(experts)
    require(len(biases) == len(experts), OP, f"{len(biases)} biases for {len(experts)} weights.")
    return [_matmul(x[a:b], w, c) for (a, b), w, c in zip(pairwise(bounds), experts, biases, strict=True)]


def _contraction(x: Tensor, weight: Tensor, bounds: list[int]) -> Tensor:
    require(x.shape[1] == weight.shape[0], OP, f"{tuple(x.shape)} x {tuple(weight.shape)} do not multiply.")
    return torch.stack([_matmul(x[:, a:b], weight[a:b]) for a, b in pairwise(bounds)])


def grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: list[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
) -> list[Tensor]:
    """Products of groups.

    group_type -1 (or None): x[i] @ weight[i]. 0: the rows of x[0] fall into groups, one weight (2-D, or one slice of a
    single 3-D weight) each. 2: the contraction dimension falls into groups, x[0] (K, T) and weight[0] (T, N) give one
    (E, K, N) tensor. A group may be empty. split_item 1 gives one output per group, 2 and 3 a single one; 0 gives
    one per x, so that it is for group_type -1 alone.
    """
    require(bool(x) and bool(weight), OP, "neither x nor weight may be empty.")
    if split_item not in (0, 1, 2, 3):
        refuse(OP, "split_item", split_item)
    single = split_item in (2, 3)
    if group_type in (-1, None) and group_list is None:
        outputs = _each(x, weight, bias)
        return [torch.cat(outputs)] if single else outputs
    if group_type not in (0, 2, None):
        refuse(OP, "group_type", group_type)
    require(group_list is not None, OP, f"group_type {group_type} needs a group_list.")
    require(split_item != 0, OP, "split_item 0 gives one output per x; groups of one x take 1, 2 or 3.")
    require(len(x) == 1 and x[0].dim() == 2, OP, "grouped rows or columns take a single 2-D x.")
    groups = group_list or []
    if group_type == 2:
        require(len(weight) == 1 and weight[0].dim() == 2, OP, "group_type 2 takes a single 2-D weight.")
        only_defaults(OP, bias=bias or None)
        stacked = _contraction(x[0], weight[0], _bounds(groups, group_list_type or 0, x[0].shape[1]))
        return [stacked] if single else list(stacked)
    outputs = _rows(x[0], weight, bias, _bounds(groups, group_list_type or 0, x[0].shape[0]))
    return [torch.cat(outputs)] if single else outputs


def _rest(act_type: int | None, output_dtype: Any, others: dict[str, Any]) -> None:
    if act_type not in (0, None):
        refuse(OP, "act_type", act_type)
    only_defaults(OP, output_dtype=output_dtype, **others)


@kernel("npu_grouped_matmul")
def _with_tensor(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: int | None = None,
    **others: Any,
) -> list[Tensor]:
    _rest(act_type, output_dtype, others)
    if group_list is not None:
        require(group_list.dtype == torch.int64, OP, f"group_list must be int64, got {group_list.dtype}.")
        require(group_list.dim() == 1, OP, f"group_list must have 1 dimension, got {group_list.dim()}.")
    require(group_type is not None, OP, "group_type only supports -1, 0 and 2, but got None")  # the vendor's words
    single = group_type == -1 or split_item in (2, 3)
    require(single, OP, f"a group_list that is a tensor takes split_item 2 or 3, got {split_item}.")
    entries = None if group_list is None else group_list.tolist()
    kind = {"split_item": split_item, "group_type": group_type, "group_list_type": group_list_type}
    return grouped_matmul(x, weight, bias=bias, group_list=entries, **kind)


@kernel("npu_grouped_matmul.List")
def _with_list(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    group_list: list[int] | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: torch.dtype | None = None,
    **others: Any,
) -> list[Tensor]:
    _rest(act_type, output_dtype, others)
    # 0 is the schema's own default, which cannot be told from a 0 that is given.
    given = {"group_type": group_type, "group_list_type": group_list_type or None}
    for name, value in given.items():
        require(value is None, OP, f"a group_list that is a list takes no {name}, got {value}.")
    return grouped_matmul(x, weight, bias=bias, group_list=group_list, split_item=split_item)
