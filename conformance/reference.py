"""The truth that the baseline is checked against: Hugging Face's own model in float64, one process, no Megatron.

It computes what one actor update computes (log-probs, entropy, verl's PPO loss, gradients, global norm, clipping, one AdamW
step), from the same checkpoint and batch, in the way of the route that it is compared with (`releases.Truth`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conformance import config as verl_config
from conformance import models, releases
from conformance.step import StepResult, StepSpec

if TYPE_CHECKING:
    from conformance.ranks import RankContext


def run(spec: StepSpec, context: RankContext) -> StepResult:
    """As `conformance.step.run`, by Hugging Face's model in float64 on one rank; `facts` are empty."""
    from safetensors.torch import load_file

    fixture = models.load(spec.model)
    overrides = verl_config.base_overrides(spec.checkpoint, 1, len(models.LENGTHS), spec.route)
    composed = verl_config.compose([*overrides, *fixture.overrides, *spec.overrides])
    model = models.build(spec.model, afresh=True).double().eval()
    way = releases.current().routes[spec.route]
    log_probs, entropy, loss, optimizer = way.truth(model, spec.role, models.make_batch(fixture), composed)
    grad_norm = weights = None
    if spec.role == "actor":
        grad_norm = _update(model, optimizer)
        # Through a checkpoint, since that is the form (and the names) in which verl exports its weights.
        model.save_pretrained(context.scratch / "updated")
        weights = load_file(context.scratch / "updated" / "model.safetensors")
    return StepResult(
        rank=context.rank,
        data_parallel_rank=0,
        log_probs=log_probs,
        entropy=entropy,
        loss=loss,
        grad_norm=grad_norm,
        weights=weights,
        facts={},
    )


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
