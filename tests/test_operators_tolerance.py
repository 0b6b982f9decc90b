"""The tolerance of every quantity of every family: just below it passes, just above it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_npu_ops_support import ops, randn

from conformance.npu.kernels import kernels
from conformance.operators import COLLECTIVE, FAMILIES, Family
from conformance.operators.catalogue import CATALOGUE
from conformance.operators.matmul import CollectiveCase, _everyones, _summed
from conformance.operators.surface import Surface
from conformance.operators.tolerance import FACTOR, Quantity, Wrong, exact, judge, must

pytestmark = pytest.mark.stack

#: As the documentation says; a larger one would only move what the tests below are relative to.
assert FACTOR == 4

SURFACE = Surface("cpu", kernels(ops))


def off_by(quantity: Quantity, share: float) -> Quantity:
    """The truth, wrong in one entry by that share of what is allowed."""
    got = quantity.truth.clone()
    got.view(-1)[-1] += share * FACTOR * quantity.yardstick
    return replace(quantity, got=got)


def check_bound(quantity: Quantity) -> None:
    judge([off_by(quantity, 0.95)])
    with pytest.raises(Wrong, match="times the expected rounding error"):
        judge([off_by(quantity, 1.05)])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in COLLECTIVE])
def test_every_bound_holds_on_one_side_and_not_on_the_other(family: Family) -> None:
    entry = CATALOGUE[family]
    seen = set()
    for case in entry.named.values():
        for quantity in entry.check(case, SURFACE):
            if quantity.truth.numel() and quantity.yardstick > 0:
                seen.add(quantity.name)
                check_bound(quantity)
    assert len(seen) >= 1
    if family not in ("grouped_matmul", "fused_adamw", "fusion_attention"):
        assert any(name.startswith("gradient") for name in seen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("biased", [False, True])
def test_the_bound_of_a_sum_over_ranks(dtype: Any, biased: bool) -> None:
    case = CollectiveCase(2, 256, 5, dtype)
    truth, rough, size = _summed(case, _everyones(case, SURFACE, 2, 2), biased)
    check_bound(Quantity("product", rough, truth, rough, rough.dtype, size, 2))


def test_the_expected_rounding_error_is_that_of_plain_torch_or_the_floor() -> None:
    truth = randn(4)
    plain = truth.clone()
    plain[1] += 0.5
    assert Quantity("x", truth, truth, plain, torch.float32).yardstick == pytest.approx(0.5)
    floor = torch.finfo(torch.float32).eps * float(truth.abs().max())
    assert Quantity("x", truth, truth, truth, torch.float32).yardstick == pytest.approx(floor)
    assert Quantity("x", truth, truth, truth, torch.float32, truth * 10, 4).yardstick == pytest.approx(floor * 20)
    overflowed = torch.full_like(truth, float("inf"))
    assert Quantity("x", truth, truth, overflowed, torch.float32).yardstick == pytest.approx(floor)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_wrong_whatever_plain_torch_does(bad: float) -> None:
    truth = randn(4)
    got = truth.clone()
    got[2] = bad
    for plain in (truth, got):
        with pytest.raises(Wrong, match="error up to"):
            judge([Quantity("x", got, truth, plain, torch.float32)])


def test_shapes_and_exact_values() -> None:
    truth = randn(4)
    with pytest.raises(Wrong, match="shape"):
        judge([Quantity("x", truth[None], truth, truth, torch.float32)])
    exact("x", truth, truth.clone())
    with pytest.raises(Wrong, match="1 of 4 values differ"):
        exact("x", truth, torch.cat((truth[:3], truth[:1])))
    with pytest.raises(Wrong, match="dtype"):
        exact("x", truth, truth.float())
    must(True, "fine")
    with pytest.raises(Wrong, match="this is why"):
        must(False, "this is why")


def test_the_message_names_all_that_is_wrong_and_the_worst_is_told() -> None:
    truth = randn(4)
    good, bad = Quantity("good", truth, truth, truth, torch.float32), Quantity("bad", truth + 1, truth, truth, torch.float32)
    with pytest.raises(Wrong, match=r"^bad, worse: error up to"):
        judge([good, bad, replace(bad, name="worse", got=truth + 2)])
    assert judge([good]).ratio == 0.0
    assert judge([good, off_by(good, 0.5)]).ratio == pytest.approx(FACTOR / 2)
