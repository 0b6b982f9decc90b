"""How small a fault each family still catches: a relative error of a stated size in each quantity, in float32.

The sizes are what runs came to, rounded up to 1, 2 or 5 of a power of ten: they say what a bound is worth. A magnitude or a
number of terms that grows turns its line red.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from operators_mutants import Mutant, MutantJob, planted
from test_npu_ops_support import ops

from conformance.npu.kernels import kernels
from conformance.operators import COLLECTIVE, FAMILIES, Family
from conformance.operators.catalogue import CATALOGUE
from conformance.operators.profiles import Explored, OperatorSpec, Profile
from conformance.operators.surface import Surface
from conformance.operators.tolerance import FACTOR, Quantity
from conformance.ranks import Job, RankServer

pytestmark = pytest.mark.stack

SURFACE = Surface("cpu", kernels(ops))
F, B = "fusion_attention", "fusion_attention_backward"


@dataclass(frozen=True)
class Fault:
    """`old` of the function's source becomes `new`, in which FAULT is 1 + `size`."""

    quantity: str
    family: Family
    size: float
    function: str
    old: str
    new: str

    def planted(self) -> Mutant:
        return Mutant(self.quantity, self.family, self.function, self.old, self.new.replace("FAULT", repr(1 + self.size)), "")


FAULTS = [
    Fault("output", F, 2e-6, "_attention_math.attend", "(probabilities @", "(FAULT * probabilities @"),
    Fault("softmax maximum", F, 2e-6, "_attention_math.attend", "top, total\n", "top * FAULT, total\n"),
    Fault("softmax sum", F, 2e-5, "_attention_math.attend", "top, total\n", "top, total * FAULT\n"),
    Fault("gradient of query", B, 2e-4, "_attention_math.attend_backward", "dq.to(", "(dq * FAULT).to("),
    Fault("gradient of key", B, 2e-4, "_attention_math.attend_backward", "(dk, kv", "(dk * FAULT, kv"),
    Fault("gradient of value", B, 5e-6, "_attention_math.attend_backward", "(dv, kv", "(dv * FAULT, kv"),
    Fault("output", "rms_norm", 1e-6, "norm.rms_norm", "(x * rstd", "(FAULT * x * rstd"),
    Fault("rstd", "rms_norm", 1e-6, "norm.rms_norm", ", rstd\n", ", rstd * FAULT\n"),
    Fault("gradient of input", "rms_norm", 5e-6, "norm.rms_norm_backward", "dx.to(", "(dx * FAULT).to("),
    Fault("gradient of gamma", "rms_norm", 5e-6, "norm.rms_norm_backward", ".sum(0)", ".sum(0) * FAULT"),
    Fault("output", "swiglu", 1e-6, "activation.swiglu", "* linear)", "* linear * FAULT)"),
    Fault("gradient of input", "swiglu", 5e-6, "activation.swiglu_backward", "(dgate,", "(dgate * FAULT,"),
    Fault("gradient of tokens", "moe_permute", 1e-6, "moe.token_permute_grad", ".sum(1)", ".sum(1).mul(FAULT)"),
    Fault("output", "moe_unpermute", 2e-6, "moe.token_unpermute", "weighted.sum(1)", "weighted.sum(1).mul(FAULT)"),
    Fault("gradient of rows", "moe_unpermute", 2e-6, "moe.token_unpermute_grad", "weighted.fl", "(weighted * FAULT).fl"),
    Fault("gradient of probs", "moe_unpermute", 2e-6, "moe.token_unpermute_grad", ".sum(-1)", ".sum(-1).mul(FAULT)"),
    Fault("output", "grouped_matmul", 2e-6, "grouped_matmul._matmul", "wide(left) @", "FAULT * wide(left) @"),
    Fault(
        "accumulated gradient",
        "grouped_matmul",
        2e-6,
        "kernels.GroupMatmulAdd.npu_groupmatmul_add_fp32",
        "x[a:b].float().T",
        "FAULT * x[a:b].float().T",
    ),
    Fault("output", "rotary", 2e-6, "rotary.rotary_mul", "+ _rotate(", "+ FAULT * _rotate("),  # cosines alone must be exact
    Fault("gradient of input", "rotary", 2e-6, "rotary.rotary_mul_backward", "dx.to(", "(dx * FAULT).to("),
    Fault("gradient of r1", "rotary", 5e-7, "rotary.rotary_mul_backward", "dr1.to(", "(dr1 * FAULT).to("),
    Fault("gradient of r2", "rotary", 5e-7, "rotary.rotary_mul_backward", "dr2.to(", "(dr2 * FAULT).to("),
    Fault("parameter", "fused_adamw", 5e-7, "optimizer.adamw_step", "(p -", "(p * FAULT -"),
    Fault("moment", "fused_adamw", 1e-6, "optimizer.adamw_step", "moment.copy_(m)", "moment.copy_(m * FAULT)"),
    Fault("square", "fused_adamw", 1e-6, "optimizer.adamw_step", "square.copy_(v)", "square.copy_(v * FAULT)"),
]

G, S, R = COLLECTIVE
#: Half precision: hardware takes no float32 there.
ON_RANKS = [
    Fault("product", G, 1e-2, "mc2.all_gather_base_mm", "_matmul(gathered, x2)", "_matmul(gathered, x2) * FAULT"),
    Fault("product", S, 1e-2, "mc2.mm_reduce_scatter_base", "return out", "return out * FAULT"),
    Fault("product", R, 1e-2, "mc2.mm_all_reduce_base", "return product", "return product * FAULT"),
]
#: A fault of the next smaller size is not caught; more is left for other processors' rounding.
SHARPNESS = 5


def worst(fault: Fault) -> float:
    """The quantity's largest error in the named cases of float32, over the expected rounding error."""
    ratios = [0.0]
    entry = CATALOGUE[fault.family]
    with planted(fault.planted(), ops):
        for case in entry.named.values():
            if case.dtype != "float32" or sum(getattr(case, "queries", ())) > 100:
                continue
            found: list[Quantity] = entry.check(case, SURFACE)
            ratios += [q.ratio for q in found if q.name == fault.quantity]
    return max(ratios)


def named(fault: Fault) -> str:
    return f"{fault.family}-{fault.quantity.replace(' ', '_')}"


@pytest.mark.parametrize("fault", FAULTS, ids=named)
def test_the_smallest_fault_that_is_caught(fault: Fault) -> None:
    assert FACTOR < worst(fault) <= SHARPNESS * FACTOR


def test_wider_bounds_do_not_catch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is for: with bounds 100 times wider every line of it fails."""
    expected = Quantity.yardstick.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Quantity, "yardstick", property(lambda q: 100 * expected(q)))
    for fault in FAULTS:
        assert worst(fault) < FACTOR, fault


def test_every_family_has_a_line() -> None:
    assert {f.family for f in (*FAULTS, *ON_RANKS)} == set(FAMILIES)


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer("conformance.operators.job:preload") as started:
        started.start()
        yield started


@pytest.mark.parametrize("fault", ON_RANKS, ids=named)
def test_the_smallest_fault_that_is_caught_on_ranks(fault: Fault, server: RankServer, tmp_path: Path) -> None:
    job = MutantJob(fault.planted(), OperatorSpec(fault.family, Profile(1, True), str(tmp_path)))
    report = server.run(Job(fault.family, "operators_mutants:run_mutant", job, 2, 60.0))
    assert report.ok, report.reason
    found = report.ranks[0].value
    assert isinstance(found, Explored)
    told = max(map(float, re.findall(r"product: error up to ([\d.]+) times", found.where)), default=0.0)  # each rank its own
    assert FACTOR < told <= SHARPNESS * FACTOR, found
