"""verl 0.7: the Megatron worker is what its trainer runs, the engine is the alternative (`trainer.use_legacy_worker_impl`).

Measured on 0.7.0 and on the branch release/v0.7.1. The released 0.7.1 calls `get_transformer_layer_offset` with a keyword that no
megatron-core 0.12 has: each of its forward passes fails (`docs/mindspeed-branches.md`).
"""

from __future__ import annotations

import sys
import types
from typing import Any

from conformance.releases import Release, Way, engine, worker
from conformance.results import Route
from conformance.stack import deviations, installed

_ACTOR = "actor_rollout_ref.actor.megatron.override_transformer_config"


def _needs(route: Route, mindspeed: bool) -> tuple[str, ...]:
    """MindSpeed refuses to build attention without use_flash_attn, which the engine sets and the worker does not. The
    engine needs packed sequences, which this line leaves off: the attention operator refuses its padded mask."""
    if route == "worker":
        return (f"++{_ACTOR}.use_flash_attn=true",) if mindspeed else ()
    return ("actor_rollout_ref.model.use_remove_padding=True",)


def _prepare() -> None:
    """A call without the device, for torch.distributed alone, where the installed stack declares it (`stacks/`).

    Stands for torch 2.8, the documented one, whose distributed_c10d does not ask for the device's capability. From 2.12 on
    `broadcast` passes the device to torch.cuda.get_device_capability, which MindSpeed 2.3.0 replaces by a function without
    arguments. That one module gets a view of torch in which the call goes without the argument, to whatever is there.
    """
    declared = any("torch.cuda.get_device_capability" in text for text in deviations(installed(None)))
    if not declared or "mindspeed.megatron_adaptor" not in sys.modules:
        return
    import torch
    from torch.distributed import distributed_c10d

    class View(types.ModuleType):
        def __init__(self, of: types.ModuleType, **own: Any) -> None:
            super().__init__(of.__name__)
            self.__dict__.update(own, _of=of)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["_of"], name)

    def capability(_device: object = None) -> Any:
        return torch.cuda.get_device_capability()

    vars(distributed_c10d)["torch"] = View(torch, cuda=View(torch.cuda, get_device_capability=capability))


RELEASE = Release(
    config_name="ppo_megatron_trainer",
    group=(),
    routes={"worker": Way(worker.WorkerDriver, worker.truth), "engine": Way(engine.EngineDriver, engine.truth)},
    engine_configs=engine.engine_configs,
    needs=_needs,
    warm=(
        "verl.workers.megatron_workers",
        "verl.workers.engine",
        "verl.workers.utils.losses",
        "verl.workers.utils.padding",
        "verl.utils.distributed",
        "verl.models.mcore.mbridge",
    ),
    prepare=_prepare,
)
