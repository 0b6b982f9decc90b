"""verl 0.8 and 0.9: the engine is the only way. Flow: `verl/workers/engine_workers.py` of 0.9.1."""

from __future__ import annotations

from typing import Any

from conformance.matrix import Role
from conformance.releases import EngineConfigs, Release, Way, engine
from conformance.results import Route


def engine_configs(config: Any, role: Role) -> EngineConfigs:
    """As verl 0.7, and what `ActorRolloutRefWorker.init_model` has learned since."""
    configs = engine.engine_configs(config, role)
    if role == "ref":
        from verl.workers.config import MtpConfig

        configs.model.mtp = MtpConfig(enable=False)
    configs.engine.use_fused_kernels = configs.model.get("use_fused_kernels", False)
    return configs


def _needs(_route: Route, _mindspeed: bool) -> tuple[str, ...]:
    return ()


def _prepare() -> None:
    """Nothing deviates."""


RELEASE = Release(
    config_name="ppo_trainer",
    group=("model_engine=megatron",),
    routes={"engine": Way(engine.EngineDriver, engine.truth)},
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
