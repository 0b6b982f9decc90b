"""What `test_plain_strict.py` runs in ranks: refusals, traps, and megatron-core's checkpoints on the plain backend."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_targets import (
    HEADS,
    SPACED,
    VALUE_CHANNELS,
    Case,
    draw,
    gap,
    group,
    inputs_of,
    layer_of,
    oracle_of,
    ours_of,
    outcome,
    share_of,
    valid_of,
)
from torch import Tensor, nn

from conformance.ranks import RankContext


def _make(kind: str, **arguments: Any) -> Any:
    import transformer_engine.pytorch as te

    base: dict[str, dict[str, Any]] = {
        "Linear": {"in_features": 4, "out_features": 4, "device": "cpu"},
        "LayerNormLinear": {"in_features": 4, "out_features": 4, "device": "cpu"},
        "GroupedLinear": {"num_gemms": 2, "in_features": 4, "out_features": 4, "device": "cpu"},
        "DotProductAttention": {"num_attention_heads": 2, "kv_channels": 4},
        "RMSNorm": {"hidden_size": 4, "device": "cpu"},
    }
    return getattr(te, kind)(**{**base[kind], **arguments})


def refusal(payload: tuple[str, dict[str, Any]], _context: RankContext) -> tuple[str, str]:
    """Type and text of what making a layer with these arguments raises; ("", "") if nothing."""
    kind, arguments = payload
    try:
        _make(kind, **arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def refusal_in_forward(payload: tuple[dict[str, Any], dict[str, Any], bool], _context: RankContext) -> tuple[str, str]:
    """As `refusal`, of attention's forward: (arguments of the layer, arguments of forward, training)."""
    made, given, training = payload
    arguments = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in given.items()}
    layer = _make("DotProductAttention", **made).train(training)
    shape = (4, 2, 4) if given.get("qkv_format") == "thd" else (4, 1, 2, 4)
    try:
        layer(*(draw(*shape, seed=i) for i in range(3)), **arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def refusal_of_name(path: str, _context: RankContext) -> str:
    """What calling a name of the package raises."""
    import transformer_engine

    found: Any = transformer_engine
    for part in path.split("."):
        found = getattr(found, part)
    try:
        found()
    except Exception as error:
        return type(error).__name__
    return ""


def nan_padding(fault: str | None, _context: RankContext) -> float:
    """Packed attention with nan wherever there is padding, against torch's on the valid tokens."""
    case = replace(SPACED, mask_type="padding", fault=fault)
    valid = valid_of(SPACED)
    cotangent = draw(len(valid), HEADS * VALUE_CHANNELS) * valid[:, None]
    inputs = inputs_of(len(valid))
    poisoned = [torch.where(valid[:, None, None], x, torch.nan) for x in inputs]
    layer = layer_of()
    ours = outcome(lambda *qkv: ours_of(case, layer, *qkv), poisoned, cotangent)
    truth = outcome(lambda *qkv: oracle_of(case, *qkv), inputs, cotangent)
    return gap([x[valid] for x in ours], [x[valid] for x in truth])


def counted_in_grad_norm(_: object, _context: RankContext) -> dict[str, bool]:
    """Whether megatron-core counts a weight in the grad norm of TP ranks other than the first."""
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

    class SecondRank:
        def rank(self) -> int:
            return 1

    made = {name: _make("Linear", rng_tracker_name=name) for name in ("data-parallel-rng", "expert-parallel-rng")}
    return {name: param_is_not_tensor_parallel_duplicate(layer.weight, SecondRank()) for name, layer in made.items()}


def column_input_layout(payload: tuple[bool, str | None], context: RankContext) -> float:
    """(transposed input, fault): gradient by the input of a column-parallel layer over all ranks against the whole on one."""
    transposed, fault = payload
    if fault == "unsummed":
        from megatron.core.tensor_parallel import mappings

        mappings._reduce = lambda x, _group: x
    with group(context) as world:
        layer = _make(
            "Linear", in_features=6, out_features=8, parallel_mode="column", tp_size=context.world_size, tp_group=world,
            params_dtype=torch.float64, bias=False, init_method=nn.init.ones_,
        )  # fmt: skip
        weight = draw(8, 6)
        with torch.no_grad():
            layer.weight.copy_(weight.chunk(context.world_size)[context.rank])
        cotangent = draw(5, 8, seed=3)

        def ours(x: Tensor) -> Tensor:
            return layer(x.t() if transposed else x)  # type: ignore[no-any-return]

        def truth(x: Tensor) -> Tensor:
            return F.linear(x.t() if transposed else x, weight)

        x = draw(6, 5) if transposed else draw(5, 6)
        part = cotangent.chunk(context.world_size, -1)[context.rank].contiguous()
        return gap(outcome(ours, [x], part)[1:], outcome(truth, [x], cotangent)[1:])


def returned_norm(payload: tuple[bool, bool, str | None], context: RankContext) -> float:
    """(sequence parallel, gathered, fault): LayerNormLinear's second output, and the gradient that flows back through both."""
    sequence_parallel, gathered, fault = payload
    size, rank = context.world_size, context.rank
    with group(context) as world:
        layer = _make(
            "LayerNormLinear", in_features=6, out_features=8, parallel_mode="column", tp_size=size, tp_group=world,
            sequence_parallel=sequence_parallel, params_dtype=torch.float64, bias=False, init_method=nn.init.ones_,
            normalization="RMSNorm", return_layernorm_output=True, return_layernorm_output_gathered=gathered,
        )  # fmt: skip
        weight, x = draw(8, 6), draw(4, 2, 6)
        with torch.no_grad():
            layer.weight.copy_(weight.chunk(size)[rank])
        by_product, by_norm = draw(4, 2, 8, seed=1), draw(4, 2, 6, seed=2)
        whole = x.clone().requires_grad_()
        normed = F.rms_norm(whole, (6,), None, 1e-5)
        torch.autograd.backward((F.linear(normed, weight) * by_product).sum() + (normed * by_norm).sum())
        assert whole.grad is not None

        def mine(y: Tensor) -> Tensor:
            return y.chunk(size, 0)[rank] if sequence_parallel else y

        local = mine(x).clone().requires_grad_()
        product, returned = layer(local)
        shown = normed if gathered else mine(normed)
        # A gathered output is used by all ranks, and their gradients are summed: each gives its share.
        back = by_norm / size if gathered and sequence_parallel else mine(by_norm)
        back = back * size if fault == "summed" else back
        ((product * by_product.chunk(size, -1)[rank]).sum() + (returned * back).sum()).backward()
        assert local.grad is not None
        return gap([returned.detach(), local.grad], [shown.detach(), mine(whole.grad)])


def context_padding(fault: str | None, context: RankContext) -> float:
    """Padded batch over ranks with the mask that verl gives: over the rank's own tokens, causality and padding in one."""
    case = Case("bshd", "padding_causal", (9, 16), (16, 16))
    valid = valid_of(case)
    cotangent = draw(len(valid), HEADS * VALUE_CHANNELS) * valid[:, None]
    truth = outcome(lambda *qkv: oracle_of(case, *qkv), inputs_of(32), cotangent)
    with group(context) as world:
        layer = layer_of(cp_group=world, cp_global_ranks=[0, 1])
        own = share_of(valid, case, context).reshape(2, -1)
        tokens = own.shape[1]
        lookahead = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        mask = (lookahead | ~own[:, None, :, None] | ~own[:, None, None, :]).clone()
        if fault == "more":
            mask[:, :, -1, 0] ^= True

        def ours(*qkv: Tensor) -> Tensor:
            batched = (x.reshape(2, -1, *x.shape[1:]) for x in qkv)
            return layer(*batched, mask, qkv_format="bshd", attn_mask_type="causal").flatten(0, 1)  # type: ignore[no-any-return]

        mine = outcome(ours, [share_of(x, case, context) for x in inputs_of(32)], share_of(cotangent, case, context))
    seen = share_of(valid, case, context)
    padding = float(mine[0][~seen].abs().max()) if bool((~seen).any()) else 0.0
    return max(padding, gap([x[seen] for x in mine], [share_of(x, case, context)[seen] for x in truth]))


def context_parallel_off(fault: str | None, context: RankContext) -> float:
    """verl's dynamic context parallelism turns it off for some micro-batches."""
    case = Case("thd", "padding_causal", (8, 4), (8, 4))
    with group(context) as world:
        layer: Any = layer_of(cp_group=world)
        if fault != "on":
            layer.set_context_parallel_group(None, None, None, "p2p")
        ours = outcome(lambda *qkv: ours_of(case, layer, *qkv), inputs_of(12))
    return gap(ours, outcome(lambda *qkv: oracle_of(case, *qkv), inputs_of(12)))


def expert_checkpoint(_: object, context: RankContext) -> list[str]:
    """Keys of the sharded state dict of megatron-core's grouped experts, after a round trip of their state dict."""
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TEColumnParallelGroupedLinear
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    with group(context):
        parallel_state.initialize_model_parallel()
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=2, num_moe_experts=2)
        layer = TEColumnParallelGroupedLinear(
            2, 4, 4, config=config, init_method=nn.init.ones_, bias=False, skip_bias_add=False, is_expert=True,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )  # fmt: skip
        layer.load_state_dict(pickle.loads(pickle.dumps(layer.state_dict())))
        sharded = layer.sharded_state_dict(metadata={"dp_cp_group": dist.group.WORLD})
    return sorted(sharded)
