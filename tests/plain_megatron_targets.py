"""megatron-core's own layers over the plain backend, in ranks: tensor parallelism against the whole on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_targets import draw, gap, group, normed, outcome
from torch import Tensor, nn

from conformance.ranks import RankContext


def tensor_parallel_mlp(payload: tuple[bool, str, str | None], context: RankContext) -> float:
    """(sequence parallel, normalization, fault): norm, column-parallel and row-parallel layers of megatron-core, TP over all
    ranks, against the same on one rank; gradients by the input and by all parameters."""
    sequence_parallel, normalization, fault = payload
    hidden, inner, tokens = 8, 12, 4
    with group(context):
        first, second = _megatron_mlp(hidden, inner, sequence_parallel, normalization, context)
        full = {"fc1": draw(inner, hidden), "fc2": draw(hidden, inner)}
        with torch.no_grad():
            first.weight.copy_(full["fc1"].chunk(context.world_size, 0)[context.rank])
            part = (context.rank + 1) % context.world_size if fault == "shard" else context.rank
            second.weight.copy_(full["fc2"].chunk(context.world_size, 1)[part])
        names = ["layer_norm_weight", "layer_norm_bias"][: 2 if normalization == "LayerNorm" else 1]
        norms = [draw(hidden, seed=i) for i in range(len(names))]

        def mine(x: Tensor) -> Tensor:
            return x.chunk(context.world_size, 0)[context.rank] if sequence_parallel else x

        def whole(x: Tensor, fc1: Tensor, fc2: Tensor, *norm: Tensor) -> Tensor:
            return F.linear(F.silu(F.linear(normed(normalization, False)(x, *norm), fc1)), fc2)

        x = draw(tokens, 2, hidden)
        cotangent = draw(tokens, 2, hidden, seed=5)
        truth = outcome(whole, [x, full["fc1"], full["fc2"], *norms], cotangent)
        for name, value in zip(names, norms, strict=True):
            getattr(first, name).data.copy_(value)
        local = mine(x).clone().requires_grad_()
        output = second(F.silu(first(local)[0]))[0]
        output.backward(mine(cotangent))
        of_norms = [getattr(first, name).grad for name in names]
        if sequence_parallel and fault != "norm":
            assert all(getattr(first, name).sequence_parallel for name in names)
            for grad in of_norms:
                dist.all_reduce(grad)  # as megatron-core does for parameters so marked
        ours = [output.detach(), local.grad, first.weight.grad, second.weight.grad, *of_norms]
        parts = [
            mine(truth[0]),
            mine(truth[1]),
            truth[2].chunk(context.world_size, 0)[context.rank],
            truth[3].chunk(context.world_size, 1)[context.rank],
            *truth[4:],
        ]
        return gap([x for x in ours if x is not None], parts)


def _megatron_mlp(hidden: int, inner: int, sequence_parallel: bool, normalization: str, context: RankContext) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TERowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=context.world_size)
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=4, normalization=normalization,
        tensor_model_parallel_size=context.world_size, sequence_parallel=sequence_parallel, params_dtype=torch.float64,
    )  # fmt: skip
    common: dict[str, Any] = {
        "config": config,
        "init_method": nn.init.normal_,
        "bias": False,
        "skip_bias_add": False,
        "is_expert": False,
    }
    first = TELayerNormColumnParallelLinear(hidden, inner, gather_output=False, **common)
    second = TERowParallelLinear(inner, hidden, input_is_parallel=True, **common)
    return first, second
