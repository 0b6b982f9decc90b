"""The fused operators under generated inputs, one test per family: on an NPU the vendor's kernels, else the emulation.

`--hypothesis-profile=ci` (the default) draws the same cases in every run; `nightly` draws many others.
"""

from __future__ import annotations

import pytest

from conformance.plugin import conclude_operator
from conformance.runner import Runner


@pytest.mark.operator("fusion_attention")
def test_fusion_attention(request: pytest.FixtureRequest, runner: Runner) -> None:
    """Values and statistics in every layout and sparse mode; members alone; junk where nobody looks; rings."""
    conclude_operator(request, runner)


@pytest.mark.operator("fusion_attention_backward")
def test_fusion_attention_backward(request: pytest.FixtureRequest, runner: Runner) -> None:
    """Gradients, whole and block by block with the whole's statistics."""
    conclude_operator(request, runner)


@pytest.mark.operator("rms_norm")
def test_rms_norm(request: pytest.FixtureRequest, runner: Runner) -> None:
    """Values, gradients, and the scale law."""
    conclude_operator(request, runner)


@pytest.mark.operator("swiglu")
def test_swiglu(request: pytest.FixtureRequest, runner: Runner) -> None:
    """Values and gradients along any dimension."""
    conclude_operator(request, runner)


@pytest.mark.operator("moe_permute")
def test_moe_permute(request: pytest.FixtureRequest, runner: Runner) -> None:
    """Rows exact, gradients, and the way back, by indices, by map, and with drop-and-pad."""
    conclude_operator(request, runner)


@pytest.mark.operator("moe_unpermute")
def test_moe_unpermute(request: pytest.FixtureRequest, runner: Runner) -> None:
    """Weighted sums of each token's rows, and gradients of rows and weights."""
    conclude_operator(request, runner)


@pytest.mark.operator("grouped_matmul")
def test_grouped_matmul(request: pytest.FixtureRequest, runner: Runner) -> None:
    """Groups of rows and of the contraction, empty ones among them."""
    conclude_operator(request, runner)


@pytest.mark.operator("all_gather_matmul")
def test_all_gather_matmul(request: pytest.FixtureRequest, runner: Runner) -> None:
    """On 2 and on 4 ranks."""
    conclude_operator(request, runner)


@pytest.mark.operator("matmul_reduce_scatter")
def test_matmul_reduce_scatter(request: pytest.FixtureRequest, runner: Runner) -> None:
    """On 2 and on 4 ranks."""
    conclude_operator(request, runner)


@pytest.mark.operator("matmul_all_reduce")
def test_matmul_all_reduce(request: pytest.FixtureRequest, runner: Runner) -> None:
    """On 2 and on 4 ranks."""
    conclude_operator(request, runner)


@pytest.mark.operator("rotary")
def test_rotary(request: pytest.FixtureRequest, runner: Runner) -> None:
    """Values and gradients of both modes."""
    conclude_operator(request, runner)


@pytest.mark.operator("fused_adamw")
def test_fused_adamw(request: pytest.FixtureRequest, runner: Runner) -> None:
    """Parameter and moments after some updates."""
    conclude_operator(request, runner)
