"""Registers `hccl` with torch.distributed, for NPU tensors and for the CPU tensors that they are here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ._C import _distributed_c10d


def is_hccl_available() -> bool:
    """Always, over Gloo."""
    return True


def install() -> None:
    """After this `init_process_group("hccl")` and `"cpu:gloo,npu:hccl"` work."""
    dist.Backend.register_backend("hccl", _distributed_c10d.create, extended_api=True, devices=["npu", "cpu"])
    dist.is_hccl_available = is_hccl_available  # type: ignore[attr-defined]
    for name, uneven in (("all_gather", _all_gather), ("reduce_scatter", _reduce_scatter)):
        wrapped = uneven(getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(dist.distributed_c10d, name, wrapped)


def _uneven(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) > 1


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """HCCL gathers tensors of unlike sizes, Gloo does not: there it is a broadcast from every rank."""

    @functools.wraps(original)
    def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not _uneven(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        work = None
        for source, out in zip(dist.get_process_group_ranks(group), tensor_list, strict=True):
            if source == dist.get_rank():
                out.copy_(tensor)
            work = dist.broadcast(out, source, group=group, async_op=async_op)
        return work

    return all_gather


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """HCCL scatters parts of unlike sizes, Gloo does not: there it is a reduction to every rank."""

    @functools.wraps(original)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if not _uneven(input_list):
            return original(output, input_list, op=op, group=group, async_op=async_op)
        if async_op:
            raise NotImplementedError("emulated hccl: reduce_scatter of unlike sizes with async_op=True")
        for target, part in zip(dist.get_process_group_ranks(group), input_list, strict=True):
            part = part.clone()
            dist.reduce(part, target, op=op, group=group)
            if target == dist.get_rank():
                output.copy_(part)
        return None

    return reduce_scatter
