"""From override strings to verl's own dataclasses, the way a real run goes.

The strings are what a user types after `python -m verl.trainer.main_ppo`. They pass verl's Hydra composition, its
`omega_conf_to_dataclass` and `validate_config`; nothing here builds a verl dataclass by hand. The steps after the
composition are the release line's, see `releases`.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from conformance import releases
from conformance.matrix import Role
from conformance.results import Route

#: Sequences of a micro-batch. With 8 sequences: 4 micro-batches at data-parallel size 1, 2 at size 2, the same cut.
MICRO_BATCH = 2
LEARNING_RATE = 0.01
#: Large, so that an update is a smooth function of the gradient: with 1e-8 the first step is sign(g), and parity of weights
#: would compare the signs of rounding errors.
ADAM_EPS = 0.001


def base_overrides(model_path: str, world_size: int, batch_size: int, route: Route | None = None) -> list[str]:
    """What every case sets before its row's keys: the fixture, the batch sizes, what the route needs, and no feature of any row.

    `route`: the release's default if None.
    `vanilla_mbridge=True` since the stack's bridge is mbridge; Megatron-Bridge needs Python 3.12 from 0.5.0 on.
    """
    arr = "actor_rollout_ref"
    release = releases.current()
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
        *release.needs(route or release.default_route, "mindspeed.megatron_adaptor" in sys.modules),
    ]


def compose(overrides: Sequence[str]) -> Any:
    """verl's trainer configuration for its Megatron engine with these overrides, as an OmegaConf DictConfig.

    Raises what Hydra raises, e.g. ConfigCompositionException for a key that needs `+`.

    A composition takes Hydra 0.3 s, nearly all of it for verl's 27 files; the overrides are the last, small part. The files
    are composed once (by the warm server, see `backend.preload`), and the overrides applied to a copy by the function with
    which Hydra itself ends a composition. `tests/test_config.py` compares both ways. What names a config group takes the
    long way, since it changes the list of files, and so does what Hydra refuses or keeps for itself.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if not all(_VALUE.match(text) for text in overrides):
        return compose_from_files(overrides)
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    if any(override.is_sweep_override() for override in parsed):
        return compose_from_files(overrides)
    config = pickle.loads(_megatron_defaults())
    ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    return config


#: A value of a key somewhere below the root: no config group, whose override has no dot, or `@`, or `/`; nothing of Hydra's own.
_VALUE = re.compile(r"[+~]*(?!hydra\.)\w+(\.\w+)+(=|$)")


def compose_from_files(overrides: Sequence[str]) -> Any:
    """The same by Hydra's public function, from verl's files, with nothing remembered."""
    import verl.trainer
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    release = releases.current()
    directory = str(Path(verl.trainer.__path__[0]).resolve() / "config")
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=directory, version_base=None):
        return hydra_compose(release.config_name, [*release.group, *overrides])


@cache
def _megatron_defaults() -> bytes:
    """The composition without any value of ours, pickled: that is the fastest way to copy it."""
    return pickle.dumps(compose_from_files([]))


def engine_configs(config: Any, role: Role) -> releases.EngineConfigs:
    """Validate the composed configuration with verl's own checks and build the role's dataclasses."""
    from verl.utils.config import validate_config

    validate_config(config, use_reference_policy=True, use_critic=False)
    return releases.current().engine_configs(config, role)
