"""One operator and one plain function on the same inputs: outputs and gradients as quantities to judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.operators.surface import Drawn, Strides, Surface, lay_out
from conformance.operators.tolerance import Quantity, must

Outputs = Sequence[Tensor]
Function = Callable[..., Outputs]
#: Entries of all inputs together up to which a derivative is also taken by finite differences.
SMALL = 400
_H = 1e-5


@dataclass(frozen=True)
class Names:
    """What messages call the inputs and the outputs. `float32` outputs have that dtype whatever the inputs', so the vendor."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    float32: tuple[str, ...] = ()


def _run(
    function: Function, inputs: Sequence[Tensor], weights: Sequence[Tensor] | None, incoming: Strides = "contiguous"
) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.detach().requires_grad_(weights is not None) for x in inputs]
    outputs = list(function(*leaves))
    if weights is None:
        return outputs, []
    sent = [_sent(w, out, incoming) for w, out in zip(weights, outputs, strict=False)]
    grads = torch.autograd.grad(outputs[: len(sent)], leaves, sent, allow_unused=True)
    return [o.detach() for o in outputs], [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]


def _sent(weight: Tensor, output: Tensor, strides: Strides) -> Tensor:
    """A gradient on the output's device, in memory as `strides` says; `expanded` as `output.sum().backward()` gives it."""
    values = weight.to(output.dtype)
    if strides == "expanded" and values.numel():
        return values.flatten()[0].to(output.device).expand(values.shape)
    return lay_out(values, strides, Surface(str(output.device)))


def weights_for(outputs: Sequence[Tensor], dtype: torch.dtype, seed: int, incoming: Strides = "contiguous") -> list[Tensor]:
    """Random gradients of the outputs, rounded to the tested dtype, so that truth and operator get the same ones.

    `expanded` gives one number for a whole output.
    """
    generator = torch.Generator("cpu").manual_seed(seed + 77)
    drawn = [torch.empty(out.shape, dtype=torch.float64, device="cpu").normal_(generator=generator).to(dtype) for out in outputs]
    if incoming == "expanded":
        return [w.flatten()[:1].expand(w.numel()).reshape(w.shape) for w in drawn]
    return drawn


def check_dtypes(names: Sequence[str], got: Sequence[Tensor], want: Sequence[torch.dtype]) -> None:
    """Wrong unless a backward operator, called by itself, gave these dtypes: autograd casts what it is given."""
    for name, g, dtype in zip(names, got, want, strict=True):
        must(g.dtype == dtype, f"gradient of {name} from the backward operator: dtype {g.dtype}, must be {dtype}")


def compare(
    operator: Function,
    plain: Function,
    inputs: Sequence[Drawn],
    names: Names,
    *,
    seed: int,
    incoming: Strides = "contiguous",
    differentiable: int = 1,
    magnitudes: Mapping[str, Tensor] | None = None,
    terms: Mapping[str, int] | None = None,
) -> list[Quantity]:
    """Quantities of every output and of every input's gradient.

    `plain` runs on float64 copies for the truth and on the inputs as they are for the yardstick. The first `differentiable`
    outputs get random gradients, in memory as `incoming` says; 0 compares values only. Small inputs also have their gradient
    compared along a random direction with a central difference of the truth.
    """
    same = [x.cpu for x in inputs]
    dtype = same[0].dtype
    doubles = [x.double() for x in same]
    with torch.no_grad():
        shapes = list(plain(*doubles))
    weights = weights_for(shapes[:differentiable], dtype, seed, incoming) if differentiable else None
    exactly = None if weights is None else [w.double() for w in weights]
    truth, truth_grads = _run(plain, doubles, exactly)
    rough, rough_grads = _run(plain, same, weights)
    got, got_grads = _run(operator, [x.device for x in inputs], weights, incoming)
    must(len(got) == len(truth), f"{len(got)} outputs, must be {len(truth)}")
    for name, g, r in zip(names.outputs, got, rough, strict=True):
        wanted = torch.float32 if name in names.float32 else r.dtype
        must(g.dtype == wanted, f"{name}: dtype {g.dtype}, must be {wanted}")
    for name, g, x in zip(names.inputs, got_grads, same, strict=False):
        must(g.dtype == x.dtype, f"gradient of {name}: dtype {g.dtype}, must be {x.dtype}")
    labels = [*names.outputs, *(f"gradient of {n}" for n in names.inputs)]
    triples = zip(labels, [*got, *got_grads], [*truth, *truth_grads], [*rough, *rough_grads], strict=False)
    sizes, lengths = magnitudes or {}, terms or {}
    quantities = [Quantity(label, g.cpu(), t, r, dtype, sizes.get(label), lengths.get(label, 1)) for label, g, t, r in triples]
    if weights is not None and 0 < sum(x.numel() for x in same) <= SMALL:
        exactly = [w.double() for w in weights]
        quantities.append(_along_a_direction(plain, doubles, exactly, got_grads, rough_grads, quantities, seed))
    return quantities


def _along_a_direction(
    plain: Function,
    doubles: Sequence[Tensor],
    weights: Sequence[Tensor],
    got: Sequence[Tensor],
    rough: Sequence[Tensor],
    quantities: Sequence[Quantity],
    seed: int,
) -> Quantity:
    """The derivative along a random direction: the operator's gradient against a central difference of the truth."""
    directions = weights_for(doubles, torch.float64, seed + 1)

    def loss(sign: float) -> Tensor:
        moved = [x + sign * _H * d for x, d in zip(doubles, directions, strict=True)]
        outputs = plain(*moved)
        return torch.stack([(o * w).sum() for o, w in zip(outputs, weights, strict=False)]).sum()

    def along(grads: Sequence[Tensor]) -> Tensor:
        return torch.stack([(g.cpu().double() * d).sum() for g, d in zip(grads, directions, strict=True)]).sum()

    difference = (loss(1.0) - loss(-1.0)) / (2 * _H)
    # Each gradient may be wrong by its own yardstick in every entry; the difference itself is good to about h squared.
    gradients = [q for q in quantities if q.name.startswith("gradient")]
    slack = sum(q.yardstick * float(d.abs().sum()) for q, d in zip(gradients, directions, strict=True))
    eps = torch.finfo(quantities[0].dtype).eps
    curvature = 1e-6 * float(sum((q.truth.abs() * d.abs()).sum() for q, d in zip(gradients, directions, strict=True)) + 1e-3)
    magnitude = torch.as_tensor((slack + curvature) / eps, dtype=torch.float64)
    name = "gradient along a direction, by finite differences"
    return Quantity(name, along(got), difference, along(rough), quantities[0].dtype, magnitude)
