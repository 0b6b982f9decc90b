"""Context parallelism by gathering: which tokens a rank holds, and all ranks' keys and values in their natural order.

The layout is the load-balanced one of megatron-core and verl: each sequence, padded to a multiple of 2 * cp, is cut
into 2 * cp chunks of equal length, and rank r holds chunks r and 2 * cp - 1 - r, one after the other, sequence after
sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .numeric import wide


def local_order(offsets: Sequence[int], cp: int, rank: int) -> Tensor:
    """Positions in the whole packed stream of the tokens that `rank` holds, in the order in which it holds them.

    `offsets`: where each sequence begins, and the end of the last: (sequences + 1), padding counted. Shape
    (offsets[-1] / cp,), int64. ValueError: with `cp` > 1, a sequence whose length is not a multiple of 2 * cp.
    """
    if cp == 1:
        return torch.arange(offsets[-1])
    held = []
    for start, end in itertools.pairwise(offsets):
        if (end - start) % (2 * cp):
            raise ValueError(f"a sequence of {end - start} tokens (padding counted) does not cut into {2 * cp} chunks")
        chunk = (end - start) // (2 * cp)
        for index in (rank, 2 * cp - 1 - rank):
            held.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
    return torch.cat(held)


def gather_tokens(x: Tensor, offsets: Sequence[int], dim: int, group: ProcessGroup | None) -> Tensor:
    """The tokens of all ranks along `dim`, in natural order, in float32 or wider; `x` holds this rank's.

    Backward sums the gradients over the ranks, in the wide type, and gives each rank those of its own tokens.
    """
    if group is None or group.size() == 1:
        return wide(x)
    cp = group.size()
    stacked = _AllGather.apply(x.movedim(dim, 0), group)  # type: ignore[no-untyped-call]
    holders = torch.cat([local_order(offsets, cp, rank) for rank in range(cp)])
    natural = holders.argsort().to(x.device)
    return stacked.flatten(0, 1).index_select(0, natural).movedim(0, dim)  # type: ignore[no-any-return]


class _AllGather(torch.autograd.Function):
    """(tokens, ...) on each rank -> (cp, tokens, ...) on all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.dtype = group, x.dtype
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return wide(torch.stack(parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()].to(ctx.dtype), None
