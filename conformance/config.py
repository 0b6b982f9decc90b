"""From override strings to verl's own dataclasses, the way a real run goes.

The strings are what a user types after `python -m verl.trainer.main_ppo`. They pass verl's Hydra composition, its
`omega_conf_to_dataclass` and `validate_config`; nothing here builds a verl dataclass by hand. The steps after the
composition follow `ActorRolloutRefWorker.init_model` of verl 0.9.1 (`verl/workers/engine_workers.py`).
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Role = Literal["actor", "ref"]
Precision = Literal["float32", "bfloat16"]

#: Sequences of a micro-batch. With 8 sequences: 4 micro-batches at data-parallel size 1, 2 at size 2, the same cut.
MICRO_BATCH = 2
#: The config group that chooses verl's Megatron engine; part of every composition.
ENGINE = "model_engine=megatron"
LEARNING_RATE = 0.01
#: Large, so that an update is a smooth function of the gradient: with 1e-8 the first step is sign(g), and parity of weights
#: would compare the signs of rounding errors.
ADAM_EPS = 0.001


def base_overrides(model_path: str, world_size: int, batch_size: int) -> list[str]:
    """What every case sets before its row's keys: the fixture, the batch sizes, and no feature of any row.

    `vanilla_mbridge=True` since the stack's bridge is mbridge; Megatron-Bridge needs Python 3.12 from 0.5.0 on.
    """
    arr = "actor_rollout_ref"
    return [
        "algorithm.adv_estimator=grpo",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={world_size}",
        f"data.train_batch_size={batch_size}",
        f"{arr}.model.path={model_path}",
        f"{arr}.rollout.name=vllm",
        f"{arr}.rollout.log_prob_micro_batch_size_per_gpu={MICRO_BATCH}",
        f"{arr}.ref.log_prob_micro_batch_size_per_gpu={MICRO_BATCH}",
        f"{arr}.actor.ppo_micro_batch_size_per_gpu={MICRO_BATCH}",
        f"{arr}.actor.ppo_mini_batch_size={batch_size}",
        f"{arr}.actor.use_kl_loss=True",
        f"{arr}.actor.entropy_coeff=0.01",
        f"{arr}.actor.optim.lr={LEARNING_RATE}",
        f"{arr}.actor.optim.total_training_steps=10",
        f"+{arr}.actor.optim.override_optimizer_config.adam_eps={ADAM_EPS}",
        f"{arr}.actor.megatron.vanilla_mbridge=True",
    ]


def compose(overrides: Sequence[str]) -> Any:
    """verl's `ppo_trainer` configuration with these overrides, as an OmegaConf DictConfig.

    Raises what Hydra raises, e.g. ConfigCompositionException for a key that needs `+`.

    A composition takes Hydra 0.3 s, nearly all of it for verl's 27 files; the overrides are the last, small part. The files
    are composed once (by the warm server, see `backend.preload`), and the overrides applied to a copy by the function with
    which Hydra itself ends a composition. `tests/test_config.py` compares both ways. What names a config group takes the
    long way, since it changes the list of files.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import ConfigCompositionException
    from omegaconf.errors import OmegaConfBaseException

    if not all(_VALUE.match(text) for text in overrides):
        return compose_from_files([ENGINE, *overrides])
    config = pickle.loads(_megatron_defaults())
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    try:
        ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    except OmegaConfBaseException as error:
        raise ConfigCompositionException().with_traceback(error.__traceback__) from error  # as Hydra's load_configuration
    return config


#: A value of a key somewhere below the root: no config group, whose override has no dot, or `@`, or `/`.
_VALUE = re.compile(r"[+~]*\w+(\.\w+)+(=|$)")


def compose_from_files(overrides: Sequence[str]) -> Any:
    """The same by Hydra's public function, from verl's files, with nothing remembered."""
    import verl.trainer
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    directory = str(Path(verl.trainer.__path__[0]).resolve() / "config")
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=directory, version_base=None):
        return hydra_compose("ppo_trainer", list(overrides))


@cache
def _megatron_defaults() -> bytes:
    """The composition without any value of ours, pickled: that is the fastest way to copy it."""
    return pickle.dumps(compose_from_files([ENGINE]))


@dataclass(frozen=True)
class EngineConfigs:
    """verl's dataclasses for one role, as its worker hands them to the engine."""

    model: Any
    engine: Any
    optimizer: Any
    checkpoint: Any
    role_config: Any


def engine_configs(config: Any, role: Role) -> EngineConfigs:
    """Validate the composed configuration with verl's own checks and build the role's dataclasses."""
    from omegaconf import open_dict
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    validate_config(config, use_reference_policy=True, use_critic=False)
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
