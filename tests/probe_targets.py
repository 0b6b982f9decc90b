"""What the tests of the probes run in forked ranks."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from conformance.probes import Facts

if TYPE_CHECKING:
    from conformance.ranks import RankContext


def preload_probes(_argument: object = None) -> str:
    """Import torch and the trace once, for all ranks."""
    importlib.import_module("conformance.probes.trace")
    return str(importlib.import_module("torch").__version__)


def trace_collectives(_payload: object, context: RankContext) -> tuple[Facts, Facts]:
    """A known number of collectives over a labelled and an unlabelled group, seen and unseen. Returns (facts, values)."""
    import torch
    import torch.distributed as dist

    from conformance.probes.trace import DispatchTrace

    dist.init_process_group("gloo", init_method=context.rendezvous, rank=context.rank, world_size=context.world_size)
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([rank]) for rank in range(2)][context.rank]
    ones = torch.ones(4)
    dist.all_reduce(ones, group=pair)  # not traced: before
    with DispatchTrace() as trace:
        for _ in range(3):
            dist.all_reduce(ones, group=pair)
        dist.all_reduce(ones, group=alone)  # one rank talks to nobody
        gathered = torch.empty(8)
        dist.all_gather_into_tensor(gathered, ones, group=pair)
        dist.all_gather([torch.empty(4), torch.empty(4)], ones, group=pair)
        scattered = torch.empty(2)
        dist.reduce_scatter_tensor(scattered, ones, group=pair)
        dist.all_to_all_single(torch.empty(4), ones, group=pair)
        dist.broadcast(ones, src=0, group=pair)
        if context.rank == 0:
            dist.send(ones, dst=1)
        else:
            dist.recv(torch.empty(4), src=0)
        dist.all_reduce(ones)  # the world, which has no label here
        ones.add(1)  # no collective
    dist.all_reduce(ones, group=pair)  # not traced: after
    dist.destroy_process_group()
    return trace.facts({pair.group_name: "tp"}), {
        "gathered": float(gathered.sum()),
        "scattered": float(scattered.sum()),
    }


def trace_backward(_payload: object, context: RankContext) -> Facts:
    """A collective that only autograd issues, in the backward pass."""
    import torch
    import torch.distributed as dist

    from conformance.probes.trace import DispatchTrace

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            dist.all_reduce(gradient)
            return gradient

    dist.init_process_group("gloo", init_method=context.rendezvous, rank=context.rank, world_size=context.world_size)
    x = torch.ones(3, requires_grad=True)
    with DispatchTrace() as trace:
        y: torch.Tensor = Reduce.apply(x)  # type: ignore[no-untyped-call]
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3
    dist.destroy_process_group()
    facts: Facts = trace.facts({})
    return facts
