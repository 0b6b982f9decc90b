"""What `test_plain_mla.py` runs in ranks: megatron-core's model with multi-latent attention over the plain backend.

mbridge 0.15.1 cannot build one without MindSpeed: it passes max_position_embeddings, which megatron-core 0.16.1's
configuration does not have. A comparison that fails raises AssertionError in the rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.ranks import RankContext

#: Relative and absolute, in float32. Rounding leaves 1e-6 of the losses and 7e-6 of gradients of up to 10; the unsummed
#: rotary key gradient moves some by 2.8.
BOUND = 1e-4
#: Lengths of the two sequences; the batch pads both to 16 tokens, packing pads them to 12 and 16 rows.
LENGTHS, SPANS = (11, 16), (12, 16)
VOCABULARY = 64
SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 10,
}


@dataclass(frozen=True)
class Reference:
    """The model on one rank, whole: parameters and gradients by name, losses of the valid tokens (27,)."""

    weights: dict[str, Tensor]
    losses: Tensor
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """`packed`: one thd row, else a causal batch. `reference`: what to equal; None: draw weights and be it."""

    packed: bool
    sequence_parallel: bool = False
    reference: Reference | None = None
    fault: str = ""


def preload(_: object) -> str:
    """megatron-core over the plain backend, on the emulated NPU. Returns where transformer_engine comes from."""
    from conformance import npu, plain

    npu.activate("emulated", mindspeed=False)
    plain.activate()
    torch.set_num_threads(1)
    importlib.import_module("torch_npu.contrib.transfer_to_npu")
    importlib.import_module("megatron.core.models.gpt.gpt_model")
    importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    return str(importlib.import_module("transformer_engine").__file__)


def run(case: Case, context: RankContext) -> Reference:
    """Losses and gradients, TP over all ranks; compared with the reference's if there is one."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    rank, size = context.rank, context.world_size
    dist.init_process_group("gloo", init_method=context.rendezvous, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    model_parallel_cuda_manual_seed(1)
    model = _model(size, case.sequence_parallel)
    named = dict(model.named_parameters())
    weights = case.reference.weights if case.reference else _drawn(named)
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(_shard(name, weights[name], parameter.shape, rank, size))
    if size > 1 and not case.sequence_parallel and case.fault != "rotary_key_gradient_unsummed":
        _sum_rotary_key_gradient(model)
    FAULTS[case.fault]()
    losses = _losses(model, case.packed)
    torch.autograd.backward(losses.sum())
    gradients = {}
    for name, parameter in named.items():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad
        if getattr(parameter, "sequence_parallel", False):  # megatron-core sums these over TP after the backward pass
            dist.all_reduce(parameter.grad)
    if case.reference is not None:
        _assert_close("losses", losses.detach(), case.reference.losses)
        for name, gradient in gradients.items():
            whole = case.reference.gradients[name]
            _assert_close(name, gradient, _shard(name, whole, gradient.shape, rank, size))
    dist.destroy_process_group()
    return Reference(weights, losses.detach(), gradients)


def _assert_close(name: str, ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=BOUND, atol=BOUND, msg=lambda text: f"{name}: {text}")


def _model(tp: int, sequence_parallel: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(
        **SIZES,
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel,
        rope_type="rope",
        apply_rope_fusion=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=torch.float32,
    )
    return GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True, qk_layernorm=True),
        vocab_size=VOCABULARY,
        max_sequence_length=32,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def _sum_rotary_key_gradient(model: Any) -> None:
    """Sum over TP the gradient of the rotary part of the keys, which all heads share.

    megatron-core 0.16.1's MLA does so with sequence parallelism only (multi_latent_attention.py, where k_pos_emb is
    gathered); without it every rank goes on with the gradient from its own heads. The backend has no part in that.
    """
    latent = SIZES["kv_lora_rank"]

    def summed(gradient: Tensor) -> Tensor:
        rotary = gradient[..., latent:].contiguous()
        dist.all_reduce(rotary)
        return torch.cat([gradient[..., :latent], rotary], -1)

    def hook(_module: Any, _arguments: Any, output: tuple[Tensor, Any]) -> None:
        output[0].register_hook(summed)  # type: ignore[no-untyped-call]

    for layer in model.decoder.layers:
        layer.self_attention.linear_kv_down_proj.register_forward_hook(hook)


def _drawn(named: dict[str, Any]) -> dict[str, Tensor]:
    """Matrices with a standard deviation of 1/sqrt(fan-in), norms about one."""
    generator = torch.Generator().manual_seed(5)
    noise = {name: torch.randn(p.shape, generator=generator) for name, p in named.items()}
    return {name: 1 + 0.2 * x if x.ndim == 1 else x * x.shape[-1] ** -0.5 for name, x in noise.items()}


def _shard(name: str, whole: Tensor, shape: torch.Size, rank: int, size: int) -> Tensor:
    """Cut along the dimension in which `shape` differs, if any; the gate and up halves each by themselves."""
    cut = [i for i, (a, b) in enumerate(zip(whole.shape, shape, strict=True)) if a != b]
    if not cut:
        return whole
    halves = whole.chunk(2) if name.endswith("linear_fc1.weight") else (whole,)
    return torch.cat([half.chunk(size, cut[0])[rank] for half in halves])


def _tokens() -> tuple[Tensor, Tensor, Tensor]:
    """ids and labels (2, 16), and which of them are valid."""
    ids = torch.randint(VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(7))
    return ids[:, :-1], ids[:, 1:], torch.arange(16) < torch.tensor(LENGTHS)[:, None]


def _losses(model: Any, packed: bool) -> Tensor:
    """Losses of the valid tokens, (27,): sequence after sequence."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ids, labels, valid = _tokens()
    if not packed:
        losses: Tensor = model(ids, torch.arange(16).expand(2, 16), None, labels=labels)
        return losses[valid]
    cu, padded = (torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in (LENGTHS, SPANS))
    packing = PackedSeqParams("thd", cu, cu, padded, padded, max(SPANS), max(SPANS))
    ids, labels, valid = (torch.cat([x[i, :span] for i, span in enumerate(SPANS)])[None] for x in (ids, labels, valid))
    position = torch.cat([torch.arange(span) for span in SPANS])[None]
    of_row: Tensor = model(ids, position, None, labels=labels, packed_seq_params=packing)
    return of_row[valid]


# --- the oracle

#: megatron-core's parameters of a layer by Hugging Face's names for DeepSeek-V3; two of theirs are one of ours.
IN_LAYER = {
    "input_layernorm.weight": ("input_layernorm",),
    "self_attention.linear_q_down_proj.weight": ("self_attn.q_a_proj",),
    "self_attention.linear_q_up_proj.layer_norm_weight": ("self_attn.q_a_layernorm",),
    "self_attention.linear_q_up_proj.weight": ("self_attn.q_b_proj",),
    "self_attention.linear_kv_down_proj.weight": ("self_attn.kv_a_proj_with_mqa",),
    "self_attention.linear_kv_up_proj.layer_norm_weight": ("self_attn.kv_a_layernorm",),
    "self_attention.linear_kv_up_proj.weight": ("self_attn.kv_b_proj",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj",),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm",),
    "mlp.linear_fc1.weight": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2.weight": ("mlp.down_proj",),
}
OUTSIDE = {
    "embedding.word_embeddings.weight": ("model.embed_tokens",),
    "decoder.final_layernorm.weight": ("model.norm",),
    "output_layer.weight": ("lm_head",),
}


def _theirs(name: str) -> tuple[str, ...]:
    if name in OUTSIDE:
        return OUTSIDE[name]
    _decoder, _layers, number, rest = name.split(".", 3)
    return tuple(f"model.layers.{number}.{new}" for new in IN_LAYER[rest])


def deepseek(weights: dict[str, Tensor], _context: RankContext) -> Reference:
    """The same by Hugging Face's DeepSeek-V3, all layers dense, on these weights."""
    from transformers.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        num_hidden_layers=SIZES["num_layers"],
        first_k_dense_replace=SIZES["num_layers"],
        hidden_size=SIZES["hidden_size"],
        intermediate_size=SIZES["ffn_hidden_size"],
        num_attention_heads=SIZES["num_attention_heads"],
        num_key_value_heads=SIZES["num_attention_heads"],
        q_lora_rank=SIZES["q_lora_rank"],
        kv_lora_rank=SIZES["kv_lora_rank"],
        qk_nope_head_dim=SIZES["qk_head_dim"],
        qk_rope_head_dim=SIZES["qk_pos_emb_head_dim"],
        v_head_dim=SIZES["v_head_dim"],
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    config._attn_implementation = "eager"
    model = DeepseekV3ForCausalLM(config).float()
    state: dict[str, Tensor] = {}
    for name, value in weights.items():
        parts = value.chunk(len(_theirs(name)))
        state |= {f"{new}.weight": part for new, part in zip(_theirs(name), parts, strict=True)}
    model.load_state_dict(state)
    ids, labels, valid = _tokens()
    losses = torch.nn.functional.cross_entropy(model(ids).logits.transpose(1, 2), labels, reduction="none")[valid]
    torch.autograd.backward(losses.sum())
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients = {name: torch.cat([found[f"{new}.weight"] for new in _theirs(name)]) for name in weights}
    return Reference(weights, losses.detach(), gradients)


# --- planted faults


def _attend_differently(change: Callable[..., tuple[Any, ...]]) -> None:
    attention: Any = importlib.import_module("transformer_engine.pytorch.attention")
    original = attention.attend
    attention.attend = lambda *arguments: original(*change(*arguments))


def _communicate_differently(name: str, substitute: Callable[..., Tensor]) -> None:
    """In the plain backend's linear layers, which look the collective up in this module."""
    setattr(importlib.import_module("megatron.core.tensor_parallel.mappings"), name, substitute)


def _without(name: str) -> Callable[[], None]:
    return lambda: _communicate_differently(name, lambda x, **_: x)


FAULTS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "rotary_key_gradient_unsummed": lambda: None,  # megatron-core as it is: see _sum_rotary_key_gradient
    "no_causal_mask": lambda: _attend_differently(lambda q, k, v, _forbidden, scale: (q, k, v, None, scale)),
    "scale_of_the_values": lambda: _attend_differently(
        lambda q, k, v, forbidden, _scale: (q, k, v, forbidden, v.shape[-1] ** -0.5)
    ),
    "no_forward_all_reduce": _without("reduce_from_tensor_model_parallel_region"),
    "no_backward_all_reduce": _without("copy_to_tensor_model_parallel_region"),
    "scatter_without_reduce": lambda: _communicate_differently(
        "reduce_scatter_to_sequence_parallel_region", lambda x, group: x.chunk(group.size())[group.rank()]
    ),
}
