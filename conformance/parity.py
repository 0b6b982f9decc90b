"""Are the numbers the same? One case against the baseline: one rank, everything off, same seed, same run.

Bounds are derived from the number format and the depth of the model, never tuned to a row:

- A value that passes N roundings of unit roundoff u carries a random-walk error of about u*sqrt(N). A transformer layer
  rounds its residual stream some eight times (two norms, qkv, attention, projection, two MLP matmuls, the gate), the head
  twice: N = 8*layers + 2 forward, twice that with the backward pass. Four standard deviations are allowed:
  4*u*sqrt(N), times the scale of the quantity.
- `identical`: bitwise, but for the global grad norm, which is summed over ranks in another order by its definition, and, where
  it came out otherwise and so the factor of clipping, for the updated weights.
- `reordered`: the bound above (float32).
- `kernel`: the error against the float64 truth, at most KERNEL_FACTOR times the baseline's own error.
- bfloat16: rounding is chaotic at this size, so both non-identical classes compare errors against the float64 truth: root
  mean square at most RMS_FACTOR, largest at most MAX_FACTOR times the baseline's own bfloat16 error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from conformance.errors import ConformanceError
from conformance.results import Precision

if TYPE_CHECKING:
    import torch

    from conformance.step import StepResult

ParityClass = Literal["identical", "reordered", "kernel"]
#: Index of an element -> what it is called in a report.
Where = Callable[[int], str]

UNIT_ROUNDOFF: dict[Precision, float] = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
#: Two evaluation orders of one format differ by sqrt(2) of one's error on average; twice that is allowed.
RMS_FACTOR = 2.0
#: The largest of some hundred errors scatters more than their root mean square.
MAX_FACTOR = 4.0
KERNEL_FACTOR = 4.0


@dataclass(frozen=True)
class Ranks:
    """Whose numbers they are, to be named where one differs: the rank of each sequence, of the grad norm, of the weights."""

    sequences: tuple[int, ...] = ()
    grad_norm: int | None = None
    weights: int | None = None


@dataclass(frozen=True)
class Export:
    """The weights as one rank exports them."""

    rank: int
    weights: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Numbers:
    """What a case computed, put together from its ranks.

    log_probs, entropy: (B, RESPONSE), nats, valid under the response mask. loss: global. grad_norm: global, before
    clipping. weights: after the update, Hugging Face names. The last three are None for ref; entropy where the route gives none.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    loss: float | None
    grad_norm: float | None
    weights: dict[str, torch.Tensor] | None
    #: Exports of other ranks, where they are not bitwise the same.
    other_weights: tuple[Export, ...] = ()
    ranks: Ranks = field(default_factory=lambda: Ranks())


@dataclass(frozen=True)
class Figure:
    """One compared quantity: its largest difference, the bound that applied, and where the difference lies."""

    quantity: str
    difference: float
    bound: float
    where: str

    @property
    def ok(self) -> bool:
        """False also for NaN."""
        return self.difference <= self.bound

    def measured(self) -> dict[str, float | str]:
        """For a record's detail, to be compared with other runs: `difference`, `bound` (text if not finite), `where`."""
        numbers = {"difference": self.difference, "bound": self.bound}
        return {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()} | {"where": self.where}


@dataclass(frozen=True)
class Scales:
    """What bounds depend on: layers of the model, and Adam's slope lr/eps from a gradient to a weight."""

    layers: int
    adam_slope: float
    clip: float = 1.0

    def relative(self, precision: Precision, passes: int = 1) -> float:
        return 4.0 * UNIT_ROUNDOFF[precision] * math.sqrt(passes * (8 * self.layers + 2))


def collect(results: Sequence[StepResult]) -> Numbers:
    """Put the data-parallel slices back in order; the loss is verl's mean over data-parallel ranks.

    Several ranks hold the grad norm and export the weights: where copies differ, all are compared.
    """
    import torch

    holders = sorted((r for r in results if r.log_probs is not None), key=lambda r: r.data_parallel_rank)
    if [r.data_parallel_rank for r in holders] != list(range(len(holders))) or not holders:
        raise ConformanceError(f"outputs came from data-parallel ranks {[r.data_parallel_rank for r in holders]}")
    losses = [r.loss for r in holders if r.loss is not None]
    exports = [Export(r.rank, r.weights) for r in results if r.weights is not None]
    norm = next((r for r in holders if r.grad_norm != holders[0].grad_norm), holders[0])
    return Numbers(
        log_probs=torch.cat([r.log_probs for r in holders if r.log_probs is not None]),
        entropy=torch.cat(entropies) if (entropies := [r.entropy for r in holders if r.entropy is not None]) else None,
        loss=sum(losses) / len(losses) if losses else None,
        grad_norm=norm.grad_norm,
        weights=exports[0].weights if exports else None,
        other_weights=_odd_copies(exports),
        ranks=Ranks(
            sequences=tuple(r.rank for r in holders if r.log_probs is not None for _ in r.log_probs),
            grad_norm=norm.rank,
            weights=exports[0].rank if exports else None,
        ),
    )


def _odd_copies(copies: Sequence[Export]) -> tuple[Export, ...]:
    """The exports of other ranks that are not bitwise the first rank's."""
    import torch

    def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    return tuple(copy for copy in copies[1:] if not same(copies[0].weights, copy.weights))


def compare(
    case: Numbers,
    baseline: Numbers,
    truth: Numbers,
    mask: torch.Tensor,
    kind: ParityClass,
    precision: Precision,
    scales: Scales,
) -> list[Figure]:
    """All figures of one case, in a fixed order.

    `mask`: (B, RESPONSE) bool. `truth` is the float64 reference; it is used by the kernel class and in bfloat16.
    Raises ConformanceError when the two sides do not hold the same quantities.
    """
    return _figures(case, baseline, truth, mask, _Rule(kind, precision, scales))


def _figures(case: Numbers, baseline: Numbers, truth: Numbers, mask: torch.Tensor, rule: _Rule) -> list[Figure]:
    figures: list[Figure] = []
    kind, precision, scales = rule.kind, rule.precision, rule.scales
    names = ("log_probs", "entropy") if baseline.entropy is not None else ("log_probs",)
    for name in names:
        if getattr(case, name) is None:
            raise ConformanceError(f"a case without {name}")
        sides = _Sides(*(getattr(side, name).double()[mask] for side in (case, baseline, truth)))
        figures.append(rule.judge(name, sides, scales.relative(precision), _token_name(mask, case.ranks.sequences)))
    if baseline.loss is None:
        return figures
    if case.loss is None or case.grad_norm is None or baseline.grad_norm is None or truth.grad_norm is None:
        raise ConformanceError("an actor case without loss or grad norm")
    for name, passes in (("loss", 1), ("grad_norm", 2)):
        sides = _Sides(*(_scalar(getattr(side, name)) for side in (case, baseline, truth)))
        # The norm of a sum over shards is reordered in every class, by its definition.
        rule_here = replace(rule, kind="reordered") if name == "grad_norm" and kind == "identical" else rule
        # The loss is a mean over all ranks, of terms of order one.
        place = "global" + (_on_rank(case.ranks.grad_norm) if name == "grad_norm" else "")
        figures.append(rule_here.judge(name, sides, scales.relative(precision, passes), _always(place), floor=1.0))
    if kind == "identical" and case.grad_norm != baseline.grad_norm:
        rule = replace(rule, kind="reordered")
    copies = [case, *(_with_export(case, export) for export in case.other_weights)]
    figures.append(max((_weights(copy, baseline, truth, rule) for copy in copies), key=share))
    return figures


def against_truth(baseline: Numbers, truth: Numbers, mask: torch.Tensor, precision: Precision, scales: Scales) -> list[Figure]:
    """The figures of the baseline itself: its rounding errors, by the derived bound of its precision."""
    return _figures(baseline, truth, truth, mask, _Rule("reordered", precision, scales, absolute=True))


@dataclass(frozen=True)
class _Sides:
    """One quantity, flat and in float64, of equal length on every side."""

    case: torch.Tensor
    baseline: torch.Tensor
    truth: torch.Tensor


@dataclass(frozen=True)
class _Rule:
    """How the figures of a case are bounded."""

    kind: ParityClass
    precision: Precision
    scales: Scales
    #: Bounded by the format alone in bfloat16, too: for the baseline, which has no baseline.
    absolute: bool = False

    def judge(self, name: str, sides: _Sides, relative: float, where: Where, floor: float = 0.0) -> Figure:
        """`relative` is times the baseline's largest value, or `floor` if that is larger."""
        case, baseline, truth = sides.case, sides.baseline, sides.truth
        if case.shape != baseline.shape:
            raise ConformanceError(f"{name}: {tuple(case.shape)} against {tuple(baseline.shape)}")
        difference = (case - baseline).abs()
        index = _worst(difference)
        absolute = relative * max(float(baseline.abs().max()), floor)
        if self.kind == "identical":
            return Figure(name, float(difference[index]), 0.0, where(index))
        if self.kind == "reordered" and (self.precision == "float32" or self.absolute):
            return Figure(name, float(difference[index]), absolute, where(index))
        own, error = (baseline - truth).abs(), (case - truth).abs()
        worst = _worst(error)
        factor = KERNEL_FACTOR if self.precision == "float32" else MAX_FACTOR
        # An error below one rounding of the quantity's own scale is no error: the baseline may hit the truth by luck.
        rounding = absolute / math.sqrt(8 * self.scales.layers + 2)
        bound = max(factor * float(own.max()), rounding)
        figure = Figure(f"{name} (error against float64)", float(error[worst]), bound, where(worst))
        rms, own_rms = float(error.square().mean().sqrt()), float(own.square().mean().sqrt())
        rms_bound = max(RMS_FACTOR * own_rms, rounding)
        if figure.ok and error.numel() > 1 and rms > rms_bound:
            return Figure(f"{name} (rms error against float64)", rms, rms_bound, where(worst))
        return figure


def _worst(difference: torch.Tensor) -> int:
    return int(difference.nan_to_num(nan=math.inf).argmax())


def _weights(case: Numbers, baseline: Numbers, truth: Numbers, rule: _Rule) -> Figure:
    """The worst parameter after the update. Compares names first: a lost or renamed parameter is a difference."""
    import torch

    if case.weights is None or baseline.weights is None or truth.weights is None:
        raise ConformanceError("an actor case without weights")
    missing = sorted(set(baseline.weights) ^ set(case.weights))
    if missing:
        return Figure("weights", math.inf, 0.0, f"only on one side: {', '.join(missing[:4])}")
    # A gradient error d moves a weight by at most slope*d; clipped gradients are at most `clip`.
    scales = rule.scales
    step = scales.adam_slope * scales.clip * scales.relative(rule.precision, passes=2)
    worst: Figure | None = None
    for name in sorted(baseline.weights):
        shape, wanted = tuple(case.weights[name].shape), tuple(baseline.weights[name].shape)
        if shape != wanted:
            return Figure("weights", math.inf, 0.0, f"{name}: shape {shape}, wanted {wanted}")
        sides = _Sides(*(weights[name].double().flatten() for weights in (case.weights, baseline.weights, truth.weights)))
        largest = float(sides.baseline.abs().max())
        relative = 2.0 * UNIT_ROUNDOFF[rule.precision] + step / max(largest, torch.finfo(torch.float32).tiny)
        figure = rule.judge("weights", sides, relative, _element_name(name, case.ranks.weights))
        if worst is None or share(figure) > share(worst):
            worst = figure
    if worst is None:
        raise ConformanceError("no weights to compare")
    return worst


def share(figure: Figure) -> float:
    """The difference as a share of its bound; infinite for NaN, and for any difference where none is allowed."""
    if math.isnan(figure.difference):
        return math.inf
    return figure.difference / figure.bound if figure.bound else figure.difference * math.inf if figure.difference else 0.0


def _scalar(value: float) -> torch.Tensor:
    import torch

    return torch.tensor([value], dtype=torch.float64)


def _with_export(case: Numbers, export: Export) -> Numbers:
    return replace(case, weights=export.weights, ranks=replace(case.ranks, weights=export.rank))


def _on_rank(rank: int | None) -> str:
    return "" if rank is None else f" on rank {rank}"


def _always(place: str) -> Where:
    return lambda _index: place


def _token_name(mask: torch.Tensor, ranks: Sequence[int]) -> Where:
    positions = mask.nonzero().tolist()

    def name(index: int) -> str:
        sequence, token = positions[index]
        return f"sequence {sequence}, response token {token}{_on_rank(ranks[sequence] if ranks else None)}"

    return name


def _element_name(parameter: str, rank: int | None) -> Where:
    return lambda index: f"{parameter}[{index}]{_on_rank(rank)}"
