"""The route `worker`: verl's Megatron worker, up to 0.7, driven without Ray. Flow: `verl/workers/megatron_workers.py` of 0.7.0.

The worker repatches, initialises process groups and megatron-core (with the actor's sizes, whatever the role), and builds the
model itself. It differs from the engine in what it computes: the loss is a mean over each micro-batch's own tokens, and
micro-batches weigh the same.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from conformance import config as verl_config
from conformance import models
from conformance.errors import ConformanceError
from conformance.matrix import Role
from conformance.releases import Opening, Outputs
from conformance.releases.engine import fields_of, next_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class WorkerDriver:
    """See `releases.Driver`. The loss is without its entropy term, which the worker does not report."""

    def __init__(self, opening: Opening) -> None:
        from verl.utils.device import get_device_name

        if get_device_name() != "npu":
            raise ConformanceError(f"verl sees device {get_device_name()!r}, not 'npu'")
        context, self._role = opening.context, opening.role
        # torch gets rank and size from the address alone: the worker does not pass them.
        os.environ["DIST_INIT_METHOD"] = f"{context.rendezvous}?rank={context.rank}&world_size={context.world_size}"
        self.engine = _worker_class(opening)(config=opening.composed.actor_rollout_ref, role=opening.role)
        self.engine.init_model()
        from megatron.core import parallel_state as mpu

        self._holds_outputs = (
            mpu.get_tensor_model_parallel_rank() == 0
            and mpu.get_context_parallel_rank() == 0
            and mpu.is_pipeline_last_stage(ignore_virtual=True)
        )
        self.data_parallel_rank = int(mpu.get_data_parallel_rank())
        size = int(mpu.get_data_parallel_world_size())
        # Each pass changes its DataProto in place, so each has its own.
        self._slices = [_data(opening.batch, opening.role).chunk(size)[self.data_parallel_rank] for _ in range(2)]
        self._log_probs: dict[str, torch.Tensor] = {}
        self._metrics: dict[str, Any] = {}
        if self._role == "actor":
            # The update reports no log-probs: these are of a forward pass of its own, before it, that no probe counts.
            found = self.engine.compute_log_prob(self._slices[1]).batch
            self._log_probs = {"log_probs": found["old_log_probs"], "entropy": found["entropys"]}

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        found: Sequence[torch.nn.Module] = self.engine.actor_module if self._role == "actor" else self.engine.ref_module
        return found

    @property
    def tf_config(self) -> Any:
        return self.engine.tf_config

    @property
    def optimizer(self) -> Any:
        return self.engine.actor_optimizer

    def run(self) -> None:
        if self._role == "ref":
            self._log_probs = {"log_probs": self.engine.compute_ref_log_prob(self._slices[0]).batch["ref_log_prob"]}
        else:
            self._metrics = self.engine.update_actor(self._slices[0]).meta_info["metrics"]

    def outputs(self) -> Outputs:
        if not self._holds_outputs:
            return Outputs()
        log_probs = self._log_probs["log_probs"].detach().cpu()
        if self._role == "ref":
            return Outputs(log_probs)
        entropy = self._log_probs["entropy"].detach().cpu()
        policy, kl = (_mean(self._metrics[f"actor/{name}"]) for name in ("pg_loss", "kl_loss"))
        loss = policy + float(self.engine.actor.config.kl_loss_coef) * kl
        return Outputs(log_probs, entropy, loss, _mean(self._metrics["actor/grad_norm"]))

    def export(self) -> dict[str, torch.Tensor]:
        pairs = self.engine.bridge.export_weights(self.engine.actor_module)
        return {name: tensor.detach().cpu().clone() for name, tensor in pairs}


def _worker_class(opening: Opening) -> Any:
    from verl.workers.megatron_workers import ActorRolloutRefWorker

    if opening.precision != "float32":
        return ActorRolloutRefWorker
    import torch

    # verl's dataclass, built inside init_model, refuses float32, so the configuration says bfloat16, and the worker's own
    # attribute, from which it derives every dtype, float32. It is the precision that finds faults; every report says so.
    float32 = property(lambda _self: torch.float32, lambda _self, _value: None)
    own = {"param_dtype": float32, "__module__": ActorRolloutRefWorker.__module__}
    return type(ActorRolloutRefWorker.__name__, (ActorRolloutRefWorker,), own)


def _data(batch: models.Batch, role: Role) -> Any:
    from verl import DataProto

    meta = {"temperature": 1.0, "global_token_num": batch.attention_mask.sum(-1).tolist()}
    fields = {name: tensor.clone() for name, tensor in fields_of(batch, role).items()}
    return DataProto.from_single_dict(fields, meta_info=meta)


def _mean(values: Any) -> float:
    listed = values if isinstance(values, list) else [values]
    return float(sum(listed)) / len(listed)


def truth(
    model: Any, role: Role, batch: models.Batch, composed: Any
) -> tuple[torch.Tensor, torch.Tensor | None, float | None, Any]:
    """See `releases.Truth`; the loss is without its entropy term, as the worker reports it. Shared: verl's loss functions."""
    import torch
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty

    configs = verl_config.engine_configs(composed, role)
    config = configs.role_config
    actor = role == "actor"
    count = len(models.LENGTHS) // verl_config.MICRO_BATCH
    log_probs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    total = 0.0
    for number in range(count):
        rows = slice(number * verl_config.MICRO_BATCH, (number + 1) * verl_config.MICRO_BATCH)
        with torch.set_grad_enabled(actor):
            found = [_response(model, batch, i) for i in range(rows.start, rows.stop)]
        log_prob, entropy = (torch.stack([pair[i] for pair in found]) for i in range(2))
        log_probs.append(log_prob.detach())
        entropies.append(entropy.detach())
        if not actor:
            continue
        mask = batch.response_mask[rows].bool()
        policy, *_ = get_policy_loss_fn("vanilla")(
            old_log_prob=batch.old_log_probs[rows], log_prob=log_prob, advantages=batch.advantages[rows],
            response_mask=mask, loss_agg_mode=config.loss_agg_mode, config=config,
        )  # fmt: skip
        penalty = kl_penalty(logprob=log_prob, ref_logprob=batch.ref_log_prob[rows], kl_penalty=config.kl_loss_type)
        kl = agg_loss(loss_mat=penalty, loss_mask=mask, loss_agg_mode=config.loss_agg_mode)
        spread = agg_loss(loss_mat=entropy, loss_mask=mask, loss_agg_mode=config.loss_agg_mode)
        reported = policy + config.kl_loss_coef * kl
        ((reported - config.entropy_coeff * spread) / count).backward()
        total += float(reported.detach()) / count
    return torch.cat(log_probs), torch.cat(entropies) if actor else None, total if actor else None, configs.optimizer


def _response(model: Any, batch: models.Batch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(RESPONSE,) each: log-probs and entropy of one sequence's response, right-padded with zeros."""
    import torch

    ids = batch.input_ids[row][batch.attention_mask[row].bool()]
    length = int(batch.response_mask[row].sum())
    start = len(ids) - length - 1
    padding = (0, models.RESPONSE - length)
    log_prob, entropy = (torch.nn.functional.pad(t[start : start + length], padding) for t in next_token(model, ids))
    return log_prob, entropy
