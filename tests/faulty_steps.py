"""Steps that are wrong in one way each: `conformance.step.run` with one fault planted in the rank's process.

A fault is a replaced upstream function, so that everything between it and the verdict is the real thing. Faults of a feature
spare runs on one rank: the baseline stays sound.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from conformance import step
from conformance.step import StepResult, StepSpec

if TYPE_CHECKING:
    from conformance.ranks import RankContext


def run_no_causal_mask(spec: StepSpec, context: RankContext) -> StepResult:
    """Attention sees the future."""
    if spec.world_size > 1:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention
        from megatron.core.transformer.enums import AttnMaskType

        def blind(forward: Any) -> Any:
            def faulty(*args: Any, attn_mask_type: Any, **kw: Any) -> Any:
                assert attn_mask_type is not AttnMaskType.padding
                return forward(*args, attn_mask_type=AttnMaskType.padding, **kw)

            return faulty

        _replace(TEDotProductAttention, "forward", blind)
    return step.run(spec, context)


def run_wrong_epsilon(spec: StepSpec, context: RankContext) -> StepResult:
    """Norms add 1e-5, as most models have it, where this one has 1e-6."""
    if spec.world_size > 1:
        _set_config(layernorm_epsilon=1e-5)
    return step.run(spec, context)


def run_wrong_baseline(spec: StepSpec, context: RankContext) -> StepResult:
    """The wrong epsilon, on one rank."""
    if spec.world_size == 1:
        _set_config(layernorm_epsilon=1e-5)
    return step.run(spec, context)


def run_wrong_baseline_everywhere(spec: StepSpec, context: RankContext) -> StepResult:
    """The wrong epsilon on any number of ranks: the case agrees with the baseline, and both are wrong."""
    _set_config(layernorm_epsilon=1e-5)
    return step.run(spec, context)


def run_missing_dp_reduction(spec: StepSpec, context: RankContext) -> StepResult:
    """Data-parallel ranks keep their own gradients: no reduce-scatter, no all-reduce."""
    if spec.world_size > 1:
        import torch
        from megatron.core.distributed import param_and_grad_buffer as buffer

        def own_shard(output: Any, full: Any, *_args: Any, group: Any, **_kw: Any) -> None:
            output.copy_(full.chunk(group.size())[group.rank()])

        def quiet(start: Any) -> Any:
            def faulty(self: Any, *args: Any, **kw: Any) -> Any:
                reduce_all = torch.distributed.all_reduce
                torch.distributed.all_reduce = lambda *_args, **_kw: None
                try:
                    return start(self, *args, **kw)
                finally:
                    torch.distributed.all_reduce = reduce_all

            return faulty

        _replace(buffer, "dist_reduce_scatter_func", lambda _reduce: own_shard)
        _replace(buffer._ParamAndGradBucketGroup, "start_grad_sync", quiet)
    return step.run(spec, context)


def run_missing_tp_reduction(spec: StepSpec, context: RankContext) -> StepResult:
    """Under sequence parallelism the norms' gradients are not summed over the tensor-parallel ranks."""
    if spec.world_size > 1:
        # By name: the package has a function that hides this module.
        module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
        _replace(module, "_allreduce_non_tensor_model_parallel_grads", lambda _reduce: lambda *_args, **_kw: None)
    return step.run(spec, context)


def run_skipping_optimizer(spec: StepSpec, context: RankContext) -> StepResult:
    """Rank 1 leaves out one parameter (or its shard of it) when it updates."""
    if spec.world_size > 1 and context.rank == 1:
        _skip_parameters(norms=False)
    return step.run(spec, context)


def run_stale_norms_on_rank_0(spec: StepSpec, context: RankContext) -> StepResult:
    """Rank 0 never updates its norms, of which every tensor-parallel rank has a copy."""
    if spec.world_size > 1 and context.rank == 0:
        _skip_parameters(norms=True)
    return step.run(spec, context)


def run_stale_norms_on_rank_1(spec: StepSpec, context: RankContext) -> StepResult:
    """The same on rank 1."""
    if spec.world_size > 1 and context.rank == 1:
        _skip_parameters(norms=True)
    return step.run(spec, context)


def run_ignored_key(spec: StepSpec, context: RankContext) -> StepResult:
    """What the row sets is taken and forgotten."""
    return step.run(dataclasses.replace(spec, overrides=()), context)


def run_shifted_labels(spec: StepSpec, context: RankContext) -> StepResult:
    """Log-probs are those of the token after the next one."""
    if spec.world_size > 1:
        from verl.workers.engine.megatron import transformer_impl

        def shift(log_probs: Any) -> Any:
            return lambda logits, label: log_probs(logits, label.roll(-1, dims=-1))

        _replace(transformer_impl, "vocab_parallel_log_probs_from_logits", shift)
    return step.run(spec, context)


def run_dropped_mask(spec: StepSpec, context: RankContext) -> StepResult:
    """The first response token is missing from the policy loss's mask: log-probs are right, the loss is not."""
    if spec.world_size > 1:
        from verl.workers.utils import losses

        def without_first(loss: Any) -> Any:
            def faulty(*args: Any, response_mask: Any, **kw: Any) -> Any:
                response_mask = response_mask.clone()
                response_mask[:, 0] = False
                return loss(*args, response_mask=response_mask, **kw)

            return faulty

        _replace(losses, "get_policy_loss_fn", lambda get: lambda name: without_first(get(name)))
    return step.run(spec, context)


def run_wrong_kv_heads(spec: StepSpec, context: RankContext) -> StepResult:
    """Query heads look at the other group's keys and values."""
    if spec.world_size > 1:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        def swap(forward: Any) -> Any:
            return lambda self, query, key, value, *rest, **kw: forward(
                self, query, key.roll(1, dims=-2), value.roll(1, dims=-2), *rest, **kw
            )

        _replace(TEDotProductAttention, "forward", swap)
    return step.run(spec, context)


def run_wrong_cp_positions(spec: StepSpec, context: RankContext) -> StepResult:
    """Every context-parallel rank turns its tokens by the rotary angles of the first rank's positions."""
    if spec.world_size > 1:
        from megatron.core.models.common.embeddings import rope_utils

        def first(angles: Any) -> Any:
            return lambda _rank, *rest, **kw: angles(0, *rest, **kw)

        _replace(rope_utils, "_get_thd_freqs_on_this_cp_rank", first)
    return step.run(spec, context)


def run_unordered_experts(spec: StepSpec, context: RankContext) -> StepResult:
    """Tokens come back from the experts of all ranks in the wrong order."""
    if spec.world_size > 1:
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        def turn(combine: Any) -> Any:
            return lambda self, *args, **kw: combine(self, *args, **kw).roll(1, dims=0)

        _replace(MoEAlltoAllTokenDispatcher, "token_combine", turn)
    return step.run(spec, context)


def run_failing_backend(spec: StepSpec, context: RankContext) -> StepResult:
    """A fault of ours: the plain stand-in for Transformer Engine raises."""
    if spec.world_size > 1:
        from transformer_engine.pytorch import attention

        _replace(attention.DotProductAttention, "_packed", lambda packed: lambda self, *_args: packed(self, None))
    return step.run(spec, context)


def _skip_parameters(*, norms: bool) -> None:
    """Adam passes over parameters that have no gradient: the norms (which alone have no weight decay), or the first one."""
    from megatron.core.optimizer.optimizer import FP32Optimizer, MixedPrecisionOptimizer

    def skip(step_with: Any) -> Any:
        def faulty(self: Any) -> Any:
            groups = self.optimizer.param_groups
            skipped = [p for g in groups if g["wd_mult"] == 0.0 for p in g["params"]] if norms else groups[0]["params"][:1]
            assert skipped
            for parameter in skipped:
                parameter.grad = None
            return step_with(self)

        return faulty

    for optimizer in (FP32Optimizer, MixedPrecisionOptimizer):
        _replace(optimizer, "step_with_ready_grads", skip)


def _replace(owner: Any, name: str, faulty: Callable[[Any], Any]) -> None:
    """Set `owner.name` to what `faulty` makes of it. AttributeError if there is none: then the fault would plant nothing."""
    setattr(owner, name, faulty(getattr(owner, name)))


def _set_config(**fields: Any) -> None:
    """Override fields of every TransformerConfig that is made from now on."""
    from megatron.core.transformer import TransformerConfig

    def override(post_init: Any) -> Any:
        def faulty(self: Any) -> None:
            post_init(self)
            for name, value in fields.items():
                assert hasattr(self, name)
                setattr(self, name, value)

        return faulty

    _replace(TransformerConfig, "__post_init__", override)


def _refused(spec: StepSpec) -> StepSpec:
    """verl itself refuses the case: a real failure of upstream."""
    own = f"+actor_rollout_ref.{spec.role}.megatron.no_such_key=1"
    return dataclasses.replace(spec, overrides=(*spec.overrides, own))


def run_float32_refused(spec: StepSpec, context: RankContext) -> StepResult:
    """More than one rank works in bfloat16 only."""
    return step.run(_refused(spec) if spec.world_size > 1 and spec.precision == "float32" else spec, context)


def run_all_refused(spec: StepSpec, context: RankContext) -> StepResult:
    """More than one rank works in no precision."""
    return step.run(_refused(spec) if spec.world_size > 1 else spec, context)


def run_float32_dies(spec: StepSpec, context: RankContext) -> StepResult:
    """More than one rank dies in float32: that is no refusal of float32."""
    if spec.world_size > 1 and spec.precision == "float32":
        os._exit(3)
    return step.run(spec, context)
