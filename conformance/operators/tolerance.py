"""How wrong an operator may be: a stated factor of the rounding error to be expected in its dtype.

An error is the distance to a float64 truth, the largest over the tensor. The expected rounding error is the larger of two:

- the error that plain torch makes in the same dtype;
- a floor, max(eps(dtype), eps(float32) * sqrt(terms)) * max(magnitude). `magnitude` is the same formula with every term taken
  absolutely, as error bounds of sums have it: each term is rounded in the dtype. `terms` is the length of the sum, which
  kernels keep in float32: its rounding errors add up like a random walk.

In most quantities the floor decides: plain torch, which rounds once or twice, is better than the bound of the formula, and
where it hits the truth by chance, or the truth is exact zeros, its error would forbid any rounding.
`tests/test_operators_sensitivity.py` holds how small a relative error each family still catches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Two right implementations differ in the order of their sums and in where they round; neither is 4 times as wrong as expected.
FACTOR = 4.0
#: What the yardstick is called in messages and records.
EXPECTED = "the expected rounding error"


class Wrong(AssertionError):
    """An operator's output is not what it must be."""


class Lost(Wrong):
    """Ranks failed in unlike ways, and may no longer reach each other: no further case can be checked."""


@dataclass(frozen=True)
class Quantity:
    """One output or gradient of one case. `got` and `plain` have the tested dtype, `truth` and `magnitude` are float64."""

    name: str
    got: Tensor
    truth: Tensor
    plain: Tensor
    dtype: torch.dtype
    magnitude: Tensor | None = None
    terms: int = 1

    @property
    def yardstick(self) -> float:
        """The rounding error to be expected, by which the operator's error is measured."""
        magnitude = self.truth if self.magnitude is None else self.magnitude
        rounding = max(torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps * math.sqrt(self.terms))
        floor = rounding * _largest(magnitude)
        plain = _largest(self.plain.double() - self.truth)
        return max(plain, floor) if math.isfinite(plain) else floor  # where plain torch overflows it measures nothing

    @property
    def ratio(self) -> float:
        """The operator's error over the expected rounding error; inf for anything that is not finite where the truth is."""
        error = _largest(self.got.double() - self.truth)
        if error == 0:
            return 0.0
        yardstick = self.yardstick
        return error / yardstick if yardstick > 0 and math.isfinite(error) else math.inf


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


@dataclass(frozen=True)
class Worst:
    """The quantity of a case with the largest ratio."""

    ratio: float
    name: str


def judge(quantities: Sequence[Quantity]) -> Worst:
    """The worst ratio of a case; Wrong for one above FACTOR and for a shape that differs from the truth's."""
    for q in quantities:
        if q.got.shape != q.truth.shape:
            raise Wrong(f"{q.name}: shape {tuple(q.got.shape)}, must be {tuple(q.truth.shape)}")
    ratios = [Worst(q.ratio, q.name) for q in quantities]
    worst = max(ratios, key=lambda w: w.ratio, default=Worst(0.0, "nothing"))
    wrong = [w.name for w in ratios if not w.ratio <= FACTOR]
    if wrong:
        raise Wrong(f"{', '.join(wrong)}: error up to {worst.ratio:.3g} times {EXPECTED}, at most {FACTOR:g}")
    return worst


def must(condition: bool, sentence: str) -> None:
    """Raise Wrong with the sentence unless the condition holds."""
    if not condition:
        raise Wrong(sentence)


def exact(name: str, got: Tensor, want: Tensor) -> None:
    """Raise Wrong unless shape, dtype and every value are the same: for what moves numbers and computes none."""
    must(got.dtype == want.dtype, f"{name}: dtype {got.dtype}, must be {want.dtype}")
    must(got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, must be {tuple(want.shape)}")
    if not torch.equal(got, want):
        raise Wrong(f"{name}: {int((got != want).sum())} of {got.numel()} values differ")
