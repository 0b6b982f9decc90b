"""The route `engine`: verl's registered engine for this device, as its workers and trainer use it.

Flow: verl 0.9.1, `verl/workers/engine_workers.py` and `verl/trainer/ppo/ray_trainer.py`.
"""

from __future__ import annotations

import dataclasses
import os
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance import config as verl_config
from conformance import models
from conformance.errors import ConformanceError
from conformance.matrix import Role
from conformance.releases import EngineConfigs, Opening, Outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class EngineDriver:
    """See `releases.Driver`."""

    def __init__(self, opening: Opening) -> None:
        from verl.utils.distributed import initialize_global_process_group_ray

        os.environ["DIST_INIT_METHOD"] = opening.context.rendezvous
        initialize_global_process_group_ray(timeout_second=600)
        self._role = opening.role
        self._configs = verl_config.engine_configs(opening.composed, opening.role)
        if opening.precision == "float32":
            # verl's dataclass allows bfloat16 and float16 only. float32 is the precision that finds faults, so it is set
            # after validation; every report says so.
            object.__setattr__(self._configs.engine, "dtype", "float32")
        self.engine = build_engine(self._configs)
        self.engine.initialize()
        self._data = _shard(to_tensordict(opening.batch, opening.composed, opening.role), self.engine)
        self._output: dict[str, Any] = {}

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        found: Sequence[torch.nn.Module] = self.engine.module
        return found

    @property
    def tf_config(self) -> Any:
        return self.engine.tf_config

    @property
    def optimizer(self) -> Any:
        return self.engine.optimizer

    @property
    def data_parallel_rank(self) -> int:
        return int(self.engine.get_data_parallel_rank())

    def run(self) -> None:
        if self._role == "ref":
            with self.engine.eval_mode():
                self._output = dict(self.engine.infer_batch(self._data, loss_function=None))
            return
        from verl.workers.utils.losses import ppo_loss

        with self.engine.train_mode():
            loss = partial(ppo_loss, config=self._configs.role_config)
            self._output = dict(self.engine.train_batch(self._data, loss_function=loss))
            self.engine.lr_scheduler_step()

    def outputs(self) -> Outputs:
        if not self.engine.is_mp_src_rank_with_outputs():
            return Outputs()
        found = self._output["model_output"]
        first = self.data_parallel_rank * len(self._data)
        log_probs, entropy = (responses(found[name].detach().cpu(), first) for name in ("log_probs", "entropy"))
        if self._role == "ref":
            return Outputs(log_probs, entropy)
        return Outputs(log_probs, entropy, float(sum(self._output["loss"])), float(self._output["metrics"]["grad_norm"]))

    def export(self) -> dict[str, torch.Tensor]:
        found = self.engine.get_per_tensor_param()
        tensors = found[0] if isinstance(found, tuple) else found
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors}


def engine_configs(config: Any, role: Role) -> EngineConfigs:
    """verl's dataclasses as `ActorRolloutRefWorker.init_model` makes them (`verl/workers/engine_workers.py`, since 0.7)."""
    from omegaconf import open_dict
    from verl.utils.config import omega_conf_to_dataclass

    arr = deepcopy(config.actor_rollout_ref)
    model = omega_conf_to_dataclass(arr.model)
    if role == "ref":
        ref = arr.ref
        with open_dict(ref):
            ref.ppo_mini_batch_size = arr.actor.ppo_mini_batch_size
            ref.ppo_micro_batch_size = ref.pop("log_prob_micro_batch_size", None)
            ref.ppo_micro_batch_size_per_gpu = ref.pop("log_prob_micro_batch_size_per_gpu", None)
            ref.use_dynamic_bsz = ref.pop("log_prob_use_dynamic_bsz", False)
            ref.ppo_max_token_len_per_gpu = ref.pop("log_prob_max_token_len_per_gpu", None)
        role_config = omega_conf_to_dataclass(ref)
        found = role_config.engine
        found.use_dynamic_bsz = ref.use_dynamic_bsz
        found.infer_max_token_len_per_gpu = ref.ppo_max_token_len_per_gpu
        found.infer_micro_batch_size_per_gpu = ref.ppo_micro_batch_size_per_gpu
    else:
        role_config = omega_conf_to_dataclass(arr.actor)
        found = role_config.engine
        found.use_dynamic_bsz = arr.actor.use_dynamic_bsz
        found.infer_max_token_len_per_gpu = arr.rollout.log_prob_max_token_len_per_gpu
        found.infer_micro_batch_size_per_gpu = arr.rollout.log_prob_micro_batch_size_per_gpu
        found.max_token_len_per_gpu = arr.actor.ppo_max_token_len_per_gpu
        found.micro_batch_size_per_gpu = arr.actor.ppo_micro_batch_size_per_gpu
    found.use_remove_padding = model.get("use_remove_padding", False)
    return EngineConfigs(model, found, role_config.optim, role_config.checkpoint, role_config)


def build_engine(configs: EngineConfigs) -> Any:
    """verl's registered engine for this device, or our own error when verl would not use its NPU engine."""
    from verl.utils.device import get_device_name
    from verl.workers.engine import EngineRegistry

    if get_device_name() != "npu":
        raise ConformanceError(f"verl sees device {get_device_name()!r}, not 'npu'")
    return EngineRegistry.new(
        model_type="language_model",
        backend=configs.engine.strategy,
        model_config=configs.model,
        engine_config=configs.engine,
        optimizer_config=configs.optimizer,
        checkpoint_config=configs.checkpoint,
    )


def to_tensordict(batch: models.Batch, composed: Any, role: Role) -> Any:
    """The batch as verl's trainer hands it to a worker: packed, with the role's fields and settings."""
    from verl import DataProto
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    meta = {"temperature": 1.0, "global_token_num": batch.attention_mask.sum(-1).tolist()}
    data = left_right_2_no_padding(DataProto.from_single_dict(fields_of(batch, role), meta_info=meta).to_tensordict())
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=verl_config.MICRO_BATCH,
        global_batch_size=len(models.LENGTHS),
        use_remove_padding=bool(composed.actor_rollout_ref.model.use_remove_padding),
        use_fused_kernels=False,
        calculate_entropy=True,
    )
    return data


def fields_of(batch: models.Batch, role: Role) -> dict[str, torch.Tensor]:
    """verl's names: the batch's fields with prompts and responses apart; ref has neither advantages nor older log-probs."""
    fields: dict[str, torch.Tensor] = dataclasses.asdict(batch)
    fields["prompts"] = batch.input_ids[:, : models.PROMPT]
    fields["responses"] = batch.input_ids[:, models.PROMPT :]
    if role == "ref":
        for name in ("advantages", "old_log_probs", "ref_log_prob"):
            del fields[name]
    return fields


def _shard(data: Any, engine: Any) -> Any:
    """This data-parallel rank's slice, in order; the model-parallel peers hold identical data."""
    from verl.utils import tensordict_utils as tu

    size = int(engine.get_data_parallel_size())
    return tu.chunk_tensordict(data, size)[int(engine.get_data_parallel_rank())] if size > 1 else data


def truth(
    model: Any, role: Role, batch: models.Batch, composed: Any
) -> tuple[torch.Tensor, torch.Tensor | None, float | None, Any]:
    """See `releases.Truth`. Shares with the engine's path only verl's loss function and data layout."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss

    configs = verl_config.engine_configs(composed, role)
    data = to_tensordict(batch, composed, role)
    mask = data["loss_mask"]
    tokens = int((mask.values() if mask.is_nested else mask).sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens)
    actor = role == "actor"
    log_probs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    total = 0.0
    for number, micro in enumerate(tu.chunk_tensordict(data, len(models.LENGTHS) // verl_config.MICRO_BATCH)):
        with torch.set_grad_enabled(actor):
            output = _forward(model, micro)
        for sink, name in ((log_probs, "log_probs"), (entropies, "entropy")):
            sink.append(responses(output[name].detach(), number * verl_config.MICRO_BATCH))
        if actor:
            loss, _metrics = ppo_loss(config=configs.role_config, model_output=output, data=micro)
            loss.backward()
            total += float(loss.detach())
    return torch.cat(log_probs), torch.cat(entropies), total if actor else None, configs.optimizer


def _forward(model: Any, micro: Any) -> dict[str, torch.Tensor]:
    """Log-probs (nats) of the next token and entropy of its distribution, jagged like `input_ids`, one sequence at a time."""
    import torch

    found = [next_token(model, ids) for ids in micro["input_ids"].unbind()]
    return {
        name: torch.nested.as_nested_tensor([pair[i] for pair in found], layout=torch.jagged)
        for i, name in enumerate(("log_probs", "entropy"))
    }


def responses(values: torch.Tensor, first: int) -> torch.Tensor:
    """Of values per token, (B, jagged), those that speak of response tokens: (B, RESPONSE), right-padded with zeros.

    Row i is sequence `first` + i of the fixed batch. What is said of a token stands at the one before it. verl's own function for
    this wants the whole batch in 0.7, where its trainer calls it after gathering.
    """
    import torch

    rows = []
    given = values.unbind()
    for row, (_prompt, length) in zip(given, models.LENGTHS[first : first + len(given)], strict=True):
        start = len(row) - length - 1
        rows.append(torch.nn.functional.pad(row[start : start + length], (0, models.RESPONSE - length)))
    return torch.stack(rows)


def next_token(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each of the tokens (T,): the log-prob of the one after it, and the entropy there; the last one wraps around."""
    scores = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    labels = ids.roll(-1)
    return scores.gather(-1, labels[:, None])[:, 0], -(scores.exp() * scores).sum(-1)
