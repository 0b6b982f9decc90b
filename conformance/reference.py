"""The truth that the baseline is checked against: Hugging Face's own model in float64, one process, no Megatron.

It computes what one actor update computes (log-probs, entropy, verl's PPO loss, gradients, global norm, clipping, one AdamW
step), from the same checkpoint and batch. It shares with the engine's path only verl's loss function and data layout.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from conformance import config as verl_config
from conformance import models
from conformance.step import StepResult, StepSpec, to_tensordict

if TYPE_CHECKING:
    import torch

    from conformance.ranks import RankContext


def run(spec: StepSpec, context: RankContext) -> StepResult:
    """As `conformance.step.run`, by Hugging Face's model in float64 on one rank; `facts` are empty."""
    import torch
    from safetensors.torch import load_file
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import no_padding_2_padding

    fixture = models.load(spec.model)
    overrides = verl_config.base_overrides(spec.checkpoint, 1, len(models.LENGTHS))
    composed = verl_config.compose([*overrides, *fixture.overrides, *spec.overrides])
    configs = verl_config.engine_configs(composed, spec.role)
    model = models.build(spec.model).double().eval()
    data = to_tensordict(models.make_batch(fixture), composed, spec.role)
    mask = data["loss_mask"]
    tokens = int((mask.values() if mask.is_nested else mask).sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens)

    actor = spec.role == "actor"
    loss_function = partial(ppo_loss, config=configs.role_config) if actor else None
    log_probs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    total = 0.0
    for micro in tu.chunk_tensordict(data, len(models.LENGTHS) // verl_config.MICRO_BATCH):
        with torch.set_grad_enabled(actor):
            output = _forward(model, micro)
        for sink, name in ((log_probs, "log_probs"), (entropies, "entropy")):
            sink.append(no_padding_2_padding(output[name], micro).detach())
        if loss_function is not None:
            loss, _metrics = loss_function(model_output=output, data=micro)
            loss.backward()
            total += float(loss.detach())
    grad_norm = weights = None
    if actor:
        grad_norm = _update(model, configs.optimizer)
        # Through a checkpoint, since that is the form (and the names) in which verl exports its weights.
        model.save_pretrained(context.scratch / "updated")
        weights = load_file(context.scratch / "updated" / "model.safetensors")
    return StepResult(
        rank=context.rank,
        data_parallel_rank=0,
        log_probs=torch.cat(log_probs),
        entropy=torch.cat(entropies),
        loss=total if actor else None,
        grad_norm=grad_norm,
        weights=weights,
        facts={},
    )


def _forward(model: Any, micro: Any) -> dict[str, torch.Tensor]:
    """Log-probs (nats) of the next token and entropy of its distribution, jagged like `input_ids`, one sequence at a time."""
    import torch

    log_probs, entropies = [], []
    for ids in micro["input_ids"].unbind():
        scores = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        labels = ids.roll(-1)
        log_probs.append(scores.gather(-1, labels[:, None])[:, 0])
        entropies.append(-(scores.exp() * scores).sum(-1))
    return {
        "log_probs": torch.nested.as_nested_tensor(log_probs, layout=torch.jagged),
        "entropy": torch.nested.as_nested_tensor(entropies, layout=torch.jagged),
    }


def _update(model: Any, optimizer: Any) -> float:
    """Clip by the global norm and do one AdamW step, in place. Weight decay spares one-dimensional parameters, as Megatron's.

    Returns the global grad norm before clipping.
    """
    import torch

    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = float(torch.sqrt(sum(((p.grad**2).sum() for p in parameters), torch.zeros((), dtype=torch.float64))))
    scale = min(1.0, optimizer.clip_grad / (norm + 1e-6))
    beta1, beta2 = optimizer.betas
    eps = optimizer.override_optimizer_config["adam_eps"]
    with torch.no_grad():
        for parameter in parameters:
            gradient = parameter.grad * scale
            if parameter.dim() > 1:
                parameter.mul_(1.0 - optimizer.lr * optimizer.weight_decay)
            # First step: both moments are bias-corrected back to the gradient itself.
            mean = (1 - beta1) * gradient / (1 - beta1)
            square = (1 - beta2) * gradient**2 / (1 - beta2)
            parameter.sub_(optimizer.lr * mean / (square.sqrt() + eps))
    return norm
