"""The plain backend on one rank: norms, linear layers and attention against torch's own, each with planted faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from plain_targets import BOUND, SPACED, Case

from conformance.ranks import Job, RankServer

pytestmark = pytest.mark.stack

PACKED = Case("thd", "padding_causal", (5, 8, 1), (5, 8, 1))


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer("plain_targets:preload", env={"OMP_NUM_THREADS": "1"}) as server:
        yield server


def run(server: RankServer, target: str, payload: object = None) -> Any:
    report = server.run(Job(target, f"plain_targets:{target}", payload, 1, 30))
    assert report.ok, report.ranks[0].raised
    return report.ranks[0].value


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm(server: RankServer, kind: str, zero_centered: bool) -> None:
    assert run(server, "norm", (kind, zero_centered, None)) < BOUND
    for fault in ("epsilon", "gamma"):
        assert run(server, "norm", (kind, zero_centered, fault)) > 1000 * BOUND


def test_norm_in_bfloat16_is_rounded_once(server: RankServer) -> None:
    assert run(server, "bf16_norm", None) <= 1.001  # the bound of one rounding
    assert run(server, "bf16_norm", "narrow") > 1.2


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "RMSNorm", "LayerNorm"])
def test_linear(server: RankServer, kind: str, bias: bool) -> None:
    assert run(server, "linear", (kind, bias, None)) < BOUND
    assert run(server, "linear", (kind, bias, "planted")) > 1000 * BOUND


@pytest.mark.parametrize("bias", [False, True])
def test_grouped_linear(server: RankServer, bias: bool) -> None:
    assert run(server, "grouped", (bias, None)) < BOUND
    assert run(server, "grouped", (bias, "shuffled")) > 1000 * BOUND


def test_marks_on_weights(server: RankServer) -> None:
    def parallel(dim: int) -> dict[str, object]:
        return {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}

    assert run(server, "weight_marks", "column") == {"shape": (4, 8), "weight": parallel(0), "bias": parallel(0)}
    row = {"shape": (8, 4), "weight": parallel(1), "bias": {"sequence_parallel": True}}
    assert run(server, "weight_marks", "row") == row


def test_weights_come_from_the_named_stream(server: RankServer) -> None:
    assert run(server, "streams") == ["default", "expert", "expert", "expert"]


@pytest.mark.parametrize(
    "case",
    [
        PACKED,
        SPACED,
        Case("thd", "padding", (5, 8, 1), (8, 8, 4)),
        *(
            Case(layout, mask_type, lengths, (6, 6))
            for layout in ("sbhd", "bshd")
            for mask_type, lengths in [
                ("causal", (6, 6)),
                ("no_mask", (6, 6)),
                ("padding", (4, 6)),
                ("padding_causal", (4, 6)),
                ("arbitrary", (4, 6)),
            ]
        ),
    ],
    ids=lambda case: f"{case.layout}-{case.mask_type}-{sum(case.room) - sum(case.lengths)}",
)
def test_attention(server: RankServer, case: Case) -> None:
    assert run(server, "attention", case) < BOUND


@pytest.mark.parametrize(
    ("case", "faults"),
    [
        (SPACED, ("mask", "scale", "groups")),
        (Case("thd", "padding", (5, 8, 1), (8, 8, 4)), ("padding",)),
        (Case("sbhd", "causal", (6, 6), (6, 6)), ("scale", "groups")),
        (Case("bshd", "padding_causal", (4, 6), (6, 6)), ("mask", "scale", "groups")),
    ],
    ids=["packed", "spaced", "causal", "padded"],
)
def test_attention_with_planted_faults(server: RankServer, case: Case, faults: tuple[str, ...]) -> None:
    for fault in faults:
        planted = Case(case.layout, case.mask_type, case.lengths, case.room, fault)
        assert run(server, "attention", planted) > 1000 * BOUND, fault


def test_padding_has_no_influence(server: RankServer) -> None:
    padded = Case("bshd", "padding_causal", (4, 6), (6, 6))
    for case in (SPACED, padded):
        assert run(server, "padding_influence", case) == 0
        planted = Case(case.layout, case.mask_type, case.lengths, case.room, "attended")
        assert run(server, "padding_influence", planted) > 1000 * BOUND


def test_a_query_that_may_look_nowhere_gives_zeros(server: RankServer) -> None:
    assert run(server, "nothing_to_look_at") == (0.0, True)
