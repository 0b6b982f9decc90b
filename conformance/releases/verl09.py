"""verl 0.8 and 0.9: the engine is the only way. Flow: `verl/workers/engine_workers.py` of 0.9.1."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from conformance.matrix import Role
from conformance.releases import EngineConfigs, Release, Way
from conformance.releases.engine import EngineDriver, truth
from conformance.results import Route


def engine_configs(config: Any, role: Role) -> EngineConfigs:
    """As `ActorRolloutRefWorker.init_model`."""
    from omegaconf import open_dict
    from verl.utils.config import omega_conf_to_dataclass

    arr = deepcopy(config.actor_rollout_ref)
    model = omega_conf_to_dataclass(arr.model)
    if role == "ref":
        from verl.workers.config import MtpConfig

        ref = arr.ref
        with open_dict(ref):
            ref.ppo_mini_batch_size = arr.actor.ppo_mini_batch_size
            ref.ppo_micro_batch_size = ref.pop("log_prob_micro_batch_size", None)
            ref.ppo_micro_batch_size_per_gpu = ref.pop("log_prob_micro_batch_size_per_gpu", None)
            ref.use_dynamic_bsz = ref.pop("log_prob_use_dynamic_bsz", False)
            ref.ppo_max_token_len_per_gpu = ref.pop("log_prob_max_token_len_per_gpu", None)
        role_config = omega_conf_to_dataclass(ref)
        model.mtp = MtpConfig(enable=False)
        engine = role_config.engine
        engine.use_dynamic_bsz = ref.use_dynamic_bsz
        engine.infer_max_token_len_per_gpu = ref.ppo_max_token_len_per_gpu
        engine.infer_micro_batch_size_per_gpu = ref.ppo_micro_batch_size_per_gpu
    else:
        actor, rollout = arr.actor, arr.rollout
        role_config = omega_conf_to_dataclass(actor)
        engine = role_config.engine
        engine.use_dynamic_bsz = actor.use_dynamic_bsz
        engine.infer_max_token_len_per_gpu = rollout.log_prob_max_token_len_per_gpu
        engine.infer_micro_batch_size_per_gpu = rollout.log_prob_micro_batch_size_per_gpu
        engine.max_token_len_per_gpu = actor.ppo_max_token_len_per_gpu
        engine.micro_batch_size_per_gpu = actor.ppo_micro_batch_size_per_gpu
    engine.use_remove_padding = model.get("use_remove_padding", False)
    engine.use_fused_kernels = model.get("use_fused_kernels", False)
    return EngineConfigs(model, engine, role_config.optim, role_config.checkpoint, role_config)


def _needs(_route: Route, _mindspeed: bool) -> tuple[str, ...]:
    return ()


def _prepare() -> None:
    """Nothing deviates."""


RELEASE = Release(
    config_name="ppo_trainer",
    group=("model_engine=megatron",),
    routes={"engine": Way(EngineDriver, truth)},
    engine_configs=engine_configs,
    needs=_needs,
    warm=(
        "verl.workers.engine",
        "verl.workers.utils.losses",
        "verl.workers.utils.padding",
        "verl.utils.distributed",
        "verl.models.mcore.mbridge",
    ),
    prepare=_prepare,
)
