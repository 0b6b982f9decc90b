"""Parity: what is equal passes, a change just inside each bound passes, just outside it fails, and the place is named."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from conformance.errors import ConformanceError  # noqa: E402
from conformance.parity import (  # noqa: E402
    KERNEL_FACTOR,
    MAX_FACTOR,
    RMS_FACTOR,
    UNIT_ROUNDOFF,
    Figure,
    Numbers,
    ParityClass,
    Scales,
    collect,
    compare,
)
from conformance.results import Precision  # noqa: E402
from conformance.step import StepResult  # noqa: E402

pytestmark = pytest.mark.stack

CLASSES: tuple[ParityClass, ...] = ("identical", "reordered", "kernel")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")
QUANTITIES = ("log_probs", "entropy", "loss", "grad_norm", "weights")
SCALES = Scales(layers=4, adam_slope=10.0)
ROWS, COLUMNS = 3, 5
MASK = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
MASK[1, 1:] = False
#: The token and the element that negative controls change.
TOKEN, ELEMENT, PARAMETER = (2, 3), (1, 2), "model.layers.1.mlp.down_proj.weight"


def truth_numbers() -> Numbers:
    """Made-up float64 numbers with the largest log-prob and weight at known places, of known sizes."""
    generator = torch.Generator().manual_seed(1)
    log_probs = -1.0 - torch.rand(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    log_probs[0, 0] = -8.0
    entropy = 1.0 + torch.rand(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    entropy[0, 1] = 4.0
    weights = {name: torch.rand(4, 6, generator=generator, dtype=torch.float64) for name in ("lm_head.weight", PARAMETER)}
    weights[PARAMETER][0, 0] = 2.0
    weights["lm_head.weight"][0, 0] = 2.0
    return Numbers(log_probs, entropy, 0.25, 3.0, weights)


def baseline_numbers(error: float) -> Numbers:
    """The truth, off by `error` in every value: the baseline's own rounding."""
    return shifted(truth_numbers(), dict.fromkeys(QUANTITIES, error))


def shifted(numbers: Numbers, by: dict[str, float]) -> Numbers:
    """Every value of the named quantities moved by that much."""
    assert numbers.loss is not None
    assert numbers.grad_norm is not None
    assert numbers.weights is not None
    return Numbers(
        numbers.log_probs + by.get("log_probs", 0.0),
        numbers.entropy + by.get("entropy", 0.0),
        numbers.loss + by.get("loss", 0.0),
        numbers.grad_norm + by.get("grad_norm", 0.0),
        {name: weight + by.get("weights", 0.0) for name, weight in numbers.weights.items()},
    )


def moved(numbers: Numbers, quantity: str, by: float) -> Numbers:
    """One value of one quantity moved by `by`: TOKEN, the scalar, or ELEMENT of PARAMETER."""
    value = getattr(numbers, quantity)
    if isinstance(value, float):
        return replace(numbers, **{quantity: value + by})  # type: ignore[arg-type]
    if isinstance(value, dict):
        changed = {name: tensor.clone() for name, tensor in value.items()}
        changed[PARAMETER][ELEMENT] += by
        return replace(numbers, weights=changed)
    changed_tensor = value.clone()
    changed_tensor[TOKEN] += by
    return replace(numbers, **{quantity: changed_tensor})


def figure_of(
    quantity: str, case: Numbers, baseline: Numbers, kind: ParityClass, precision: Precision, scales: Scales = SCALES
) -> Figure:
    figures = compare(case, baseline, truth_numbers(), MASK, kind, precision, scales)
    assert [figure.quantity.partition(" ")[0] for figure in figures] == list(QUANTITIES)
    others = [figure for figure in figures if not figure.quantity.startswith(quantity)]
    assert all(figure.ok for figure in others), others
    return next(figure for figure in figures if figure.quantity.startswith(quantity))


def own_error(precision: Precision) -> float:
    """An error of the baseline that its precision explains, and well above one rounding of any quantity here."""
    return 64 * UNIT_ROUNDOFF[precision]


def derived_bound(quantity: str, kind: ParityClass, precision: Precision, scales: Scales = SCALES) -> float:
    """The bound as the module's text derives it, computed here a second time.

    In the kernel and bfloat16 cases it limits the distance from the truth, else the distance from the baseline.
    """
    if kind == "identical" and quantity != "grad_norm":
        return 0.0
    if kind != "kernel" and precision == "float32":
        u, roundings = UNIT_ROUNDOFF[precision], 8 * scales.layers + 2
        own = own_error(precision)  # the baseline's scale is the truth's, moved by this
        largest = {"log_probs": 8.0 - own, "entropy": 4.0 + own, "loss": 1.0, "grad_norm": 3.0 + own}
        if quantity == "weights":
            there_and_back = 4 * u * math.sqrt(2 * roundings)
            return 2 * u * (2.0 + own) + scales.adam_slope * scales.clip * there_and_back
        return 4 * u * math.sqrt((2 if quantity == "grad_norm" else 1) * roundings) * largest[quantity]
    return (KERNEL_FACTOR if precision == "float32" else MAX_FACTOR) * own_error(precision)


def reached(quantity: str, kind: ParityClass, precision: Precision, share: float) -> Figure:
    """The figure when one value lies at `share` of its bound."""
    baseline = baseline_numbers(own_error(precision))
    if figure_is_of_errors(quantity, kind, precision):
        # Away from the truth, in the direction in which the baseline errs.
        by = share * derived_bound(quantity, kind, precision) - own_error(precision)
    else:
        by = share * derived_bound(quantity, kind, precision)
    return figure_of(quantity, moved(baseline, quantity, by), baseline, kind, precision)


def figure_is_of_errors(quantity: str, kind: ParityClass, precision: Precision) -> bool:
    if kind == "identical":
        return quantity == "grad_norm" and precision == "bfloat16"
    return kind == "kernel" or precision == "bfloat16"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", CLASSES)
def test_equal_passes(kind: ParityClass, precision: Precision) -> None:
    for error in (0.0, own_error(precision)):
        baseline = baseline_numbers(error)
        figures = compare(baseline, baseline, truth_numbers(), MASK, kind, precision, SCALES)
        assert all(figure.ok for figure in figures), figures


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_negative_control_at_each_bound(quantity: str, kind: ParityClass, precision: Precision) -> None:
    bound = derived_bound(quantity, kind, precision)
    if bound == 0.0:
        value = -1e-15 if quantity == "loss" else -4e-15
        assert not figure_of(
            quantity,
            moved(baseline_numbers(0.0), quantity, value),
            baseline_numbers(0.0),
            kind,
            precision,
        ).ok
        return
    inside, outside = (reached(quantity, kind, precision, share) for share in (0.9, 1.01))
    assert inside.ok, inside
    assert not outside.ok, outside
    assert outside.bound == pytest.approx(bound, rel=1e-4)
    assert outside.difference == pytest.approx(1.01 * bound, rel=1e-4)


def test_identical_weights_follow_a_reordered_norm() -> None:
    """The norm scales the gradients: where its last bit moved, the weights' may, within the reordered bound and no further."""
    ours = baseline_numbers(0.0)
    norm = 2.0 * UNIT_ROUNDOFF["float32"] * 3.0
    bit = 2.0**-24
    assert not figure_of("weights", moved(ours, "weights", bit), ours, "identical", "float32").ok
    other = moved(moved(ours, "weights", bit), "grad_norm", norm)
    assert figure_of("weights", other, ours, "identical", "float32").ok
    assert not figure_of("weights", moved(other, "weights", 0.5), ours, "identical", "float32").ok
    assert not figure_of("log_probs", moved(other, "log_probs", bit), ours, "identical", "float32").ok


@pytest.mark.parametrize("precision", PRECISIONS)
def test_identical_is_bitwise(precision: Precision) -> None:
    ours = truth_numbers()
    for quantity in ("log_probs", "entropy", "weights"):
        value = getattr(ours, quantity)
        tensor = value[PARAMETER] if isinstance(value, dict) else value
        place = ELEMENT if quantity == "weights" else TOKEN
        now = float(tensor[place])
        last_bit = math.nextafter(now, math.inf) - now
        assert not figure_of(quantity, moved(ours, quantity, last_bit), ours, "identical", precision).ok


@pytest.mark.parametrize("kind", ["reordered", "kernel"])
def test_root_mean_square_is_bounded_in_bfloat16(kind: ParityClass) -> None:
    # Every token off by a little less than what the largest may be: no single one is too far out.
    own = own_error("bfloat16")
    baseline = baseline_numbers(own)
    for share, ok in ((0.9, True), (1.01, False)):
        case = shifted(baseline, {"log_probs": (share * RMS_FACTOR - 1.0) * own})
        figure = figure_of("log_probs", case, baseline, kind, "bfloat16")
        assert figure.ok is ok, figure
        assert ("rms" in figure.quantity) is not ok


def test_root_mean_square_is_bounded_when_the_errors_scatter() -> None:
    # The baseline's largest error is three times its root mean square.
    own = torch.full((ROWS, COLUMNS), 0.1, dtype=torch.float64)
    own[0, 0] = 0.5
    truth = truth_numbers()
    baseline = replace(truth, log_probs=truth.log_probs + own)
    own_rms = float(own[MASK].square().mean().sqrt())
    for share, ok in ((0.9, True), (1.01, False)):
        case = replace(truth, log_probs=truth.log_probs + share * RMS_FACTOR * own_rms)
        figure = figure_of("log_probs", case, baseline, "reordered", "bfloat16")
        assert figure.ok is ok, figure


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_baseline_that_hits_the_truth_leaves_one_rounding(precision: Precision) -> None:
    rounding = 4 * UNIT_ROUNDOFF[precision] * 8.0  # the largest log-prob is -8
    baseline = baseline_numbers(0.0)
    for share, ok in ((0.9, True), (1.01, False)):
        case = moved(baseline, "log_probs", share * rounding)
        assert figure_of("log_probs", case, baseline, "kernel", precision).ok is ok


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_not_a_number_fails(quantity: str, kind: ParityClass, precision: Precision) -> None:
    baseline = baseline_numbers(own_error(precision))
    assert not figure_of(quantity, moved(baseline, quantity, math.nan), baseline, kind, precision).ok
    assert not figure_of(quantity, moved(baseline, quantity, math.inf), baseline, kind, precision).ok
    # Nor does it agree with itself: a baseline that is NaN is no baseline.
    both = moved(baseline, quantity, math.nan)
    assert not figure_of(quantity, both, both, kind, precision).ok


@pytest.mark.parametrize("kind", CLASSES)
def test_the_place_is_named(kind: ParityClass) -> None:
    baseline = baseline_numbers(0.0)
    places = {
        "log_probs": "sequence 2, response token 3",
        "entropy": "sequence 2, response token 3",
        "loss": "global",
        "grad_norm": "global",
        "weights": f"{PARAMETER}[{ELEMENT[0] * 6 + ELEMENT[1]}]",
    }
    for quantity, place in places.items():
        assert figure_of(quantity, moved(baseline, quantity, 0.1), baseline, kind, "float32").where == place
        assert figure_of(quantity, moved(baseline, quantity, math.nan), baseline, kind, "float32").where == place


@pytest.mark.parametrize("kind", CLASSES)
def test_only_tokens_under_the_mask_count(kind: ParityClass) -> None:
    baseline = baseline_numbers(0.0)
    case = replace(baseline, log_probs=baseline.log_probs.clone(), entropy=baseline.entropy.clone())
    case.log_probs[1, 2] = math.nan
    case.entropy[1, 4] = 100.0
    assert all(f.ok for f in compare(case, baseline, truth_numbers(), MASK, kind, "float32", SCALES))


@pytest.mark.parametrize("kind", CLASSES)
def test_names_and_shapes_of_weights_are_compared(kind: ParityClass) -> None:
    baseline = baseline_numbers(0.0)
    assert baseline.weights is not None
    lost = {name: w for name, w in baseline.weights.items() if name != PARAMETER}
    renamed = {**lost, "model.layers.1.mlp.w2": baseline.weights[PARAMETER]}
    more = {**baseline.weights, "extra": baseline.weights[PARAMETER]}
    for weights, named in ((lost, PARAMETER), (renamed, "model.layers.1.mlp.w2"), (more, "extra")):
        figure = figure_of("weights", replace(baseline, weights=weights), baseline, kind, "float32")
        assert not figure.ok
        assert named in figure.where
    transposed = {**baseline.weights, PARAMETER: baseline.weights[PARAMETER].T}
    figure = figure_of("weights", replace(baseline, weights=transposed), baseline, kind, "float32")
    assert not figure.ok
    assert figure.where == f"{PARAMETER}: shape (6, 4), wanted (4, 6)"


def test_bounds_follow_depth_and_number_format() -> None:
    shallow, deep = Scales(1, 10.0), Scales(16, 10.0)
    assert deep.relative("float32") / shallow.relative("float32") == pytest.approx(math.sqrt(130 / 10))
    assert deep.relative("float32", passes=2) / deep.relative("float32") == pytest.approx(math.sqrt(2))
    assert deep.relative("bfloat16") / deep.relative("float32") == 2.0**16
    assert UNIT_ROUNDOFF["float32"] == torch.finfo(torch.float32).eps / 2
    assert UNIT_ROUNDOFF["bfloat16"] == torch.finfo(torch.bfloat16).eps / 2
    baseline = baseline_numbers(own_error("float32"))
    for scales in (shallow, deep):
        for quantity in QUANTITIES:
            bound = figure_of(quantity, baseline, baseline, "reordered", "float32", scales).bound
            assert bound == pytest.approx(derived_bound(quantity, "reordered", "float32", scales), rel=1e-4)


def test_ref_has_no_more_than_log_probs_and_entropy() -> None:
    ref = replace(baseline_numbers(0.0), loss=None, grad_norm=None, weights=None)
    figures = compare(ref, ref, ref, MASK, "reordered", "float32", SCALES)
    assert [figure.quantity for figure in figures] == ["log_probs", "entropy"]


def test_an_actor_case_that_lacks_a_quantity_is_our_error() -> None:
    baseline = baseline_numbers(0.0)
    for lacking in ({"loss": None}, {"grad_norm": None}, {"weights": None}):
        with pytest.raises(ConformanceError, match="an actor case without"):
            compare(
                replace(baseline, **lacking),  # type: ignore[arg-type]
                baseline,
                truth_numbers(),
                MASK,
                "reordered",
                "float32",
                SCALES,
            )


def result(rank: int, dp: int, log_probs: float | None, loss: float | None = None) -> StepResult:
    tensor = None if log_probs is None else torch.full((1, COLUMNS), log_probs)
    weights = {"w": torch.ones(1)} if rank == 0 else None
    return StepResult(rank, dp, tensor, tensor, loss, loss, weights, {})


def test_ranks_are_put_together_in_the_order_of_their_data() -> None:
    numbers = collect([result(0, 1, -2.0, 3.0), result(1, 0, -1.0, 1.0), result(2, 0, None)])
    assert numbers.log_probs[:, 0].tolist() == [-1.0, -2.0]
    assert numbers.loss == 2.0
    assert numbers.weights is not None


@pytest.mark.parametrize("ranks", [[0, 0], [0, 2], [1], []])
def test_missing_or_doubled_slices_are_our_error(ranks: list[int]) -> None:
    with pytest.raises(ConformanceError, match="data-parallel ranks"):
        collect([result(i, dp, -1.0) for i, dp in enumerate(ranks)])


def test_a_grad_norm_that_differs_on_one_rank_is_the_one_compared() -> None:
    def result(rank: int, norm: float) -> StepResult:
        numbers = torch.zeros(1, COLUMNS)
        return StepResult(rank, rank, numbers, numbers, 0.0, norm, None, {})

    assert collect([result(0, 1.0), result(1, 1.0)]).grad_norm == 1.0
    assert collect([result(0, 1.0), result(1, 2.0)]).grad_norm == 2.0


def test_an_export_that_differs_on_one_rank_is_kept() -> None:
    def result(rank: int, value: float) -> StepResult:
        numbers = torch.zeros(1, COLUMNS)
        return StepResult(rank, rank, numbers, numbers, 0.0, 1.0, {PARAMETER: torch.full((2,), value)}, {})

    assert collect([result(0, 1.0), result(1, 1.0)]).other_weights == ()
    assert [export.rank for export in collect([result(0, 1.0), result(1, 2.0)]).other_weights] == [1]


@pytest.mark.parametrize("kind", CLASSES)
def test_the_rank_is_named(kind: ParityClass) -> None:
    whole = baseline_numbers(0.0)
    assert whole.weights is not None

    def result(rank: int, dp: int, rows: slice, **change: Any) -> StepResult:
        sound = {"loss": whole.loss, "grad_norm": whole.grad_norm, "weights": whole.weights}
        return StepResult(rank, dp, whole.log_probs[rows].clone(), whole.entropy[rows], **(sound | change), facts={})

    # Rank 5 is the first data-parallel rank, rank 3 the second, which holds the last sequence and has all the faults.
    worse = {name: weight.clone() for name, weight in whole.weights.items()}
    worse[PARAMETER][ELEMENT] += 0.1
    first, second = result(5, 0, slice(0, ROWS - 1)), result(3, 1, slice(ROWS - 1, ROWS), grad_norm=4.0, weights=worse)
    assert second.log_probs is not None
    second.log_probs[0, TOKEN[1]] += 0.1
    case = collect([first, second])
    figures = compare(case, whole, truth_numbers(), MASK, kind, "float32", SCALES)
    assert {figure.quantity.partition(" ")[0]: figure.where for figure in figures if not figure.ok} == {
        "log_probs": f"sequence {ROWS - 1}, response token {TOKEN[1]} on rank 3",
        "grad_norm": "global on rank 3",
        "weights": f"{PARAMETER}[{ELEMENT[0] * 6 + ELEMENT[1]}] on rank 3",
    }
