"""The plain backend under megatron-core in several ranks: parallel equals one rank, and planted faults do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from plain_targets import ContextCase, MlaCase, Reference, TensorCase

from conformance import plain
from conformance.ranks import Job, JobReport, RankServer

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer("plain_targets:preload", env={"OMP_NUM_THREADS": "1"}) as server:
        assert str(server.start()).startswith(str(plain.PATH))
        yield server


def run(server: RankServer, target: str, payload: object, ranks: int) -> JobReport:
    return server.run(Job(f"{target} on {ranks}", f"plain_targets:{target}", payload, ranks, 60))


def assert_ok(report: JobReport) -> JobReport:
    assert report.ok, report.first_failure
    return report


def assert_caught(report: JobReport) -> None:
    """The comparison failed in some rank, and nothing else did."""
    assert {rank.raised.type for rank in report.ranks if rank.raised} == {"AssertionError"}, report


SBHD = ContextCase()
FULL = ContextCase(mask_type="no_mask")
PACKED = ContextCase(mask_type="padding_causal", spans=(16, 8, 24), lengths=(16, 8, 24))
#: The second sequence is so short that some ranks have padding only.
PADDED = ContextCase(mask_type="padding_causal", spans=(16, 8, 24), lengths=(13, 1, 17))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", [SBHD, FULL, PACKED, PADDED], ids=["sbhd", "no_mask", "packed", "padded"])
def test_context_parallel_equals_one_rank(server: RankServer, case: ContextCase, ranks: int) -> None:
    assert_ok(run(server, "context_parallel", case, ranks))


@pytest.mark.parametrize("fault", ["no_causal_mask", "contiguous_order", "keys_gathered_without_gradient"])
@pytest.mark.parametrize("case", [SBHD, PADDED], ids=["sbhd", "padded"])
def test_context_parallel_fault_is_caught(server: RankServer, case: ContextCase, fault: str) -> None:
    assert_caught(run(server, "context_parallel", replace(case, fault=fault), 2))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(("layer", "mode"), [("Linear", "column"), ("Linear", "row"), ("LayerNormLinear", "column")])
def test_tensor_parallel_equals_whole(server: RankServer, layer: str, mode: str, sequence_parallel: bool) -> None:
    assert_ok(run(server, "tensor_parallel", TensorCase(layer, mode, sequence_parallel), 2))


@pytest.mark.parametrize(
    "case",
    [
        TensorCase("Linear", "row", False, "no_forward_all_reduce"),
        TensorCase("Linear", "row", False, "bias_before_reduce"),
        TensorCase("Linear", "column", False, "no_backward_all_reduce"),
        TensorCase("Linear", "row", True, "scatter_without_reduce"),
        TensorCase("LayerNormLinear", "column", True, "keys_gathered_without_gradient"),
        TensorCase("LayerNormLinear", "column", False, "no_backward_all_reduce"),
    ],
    ids=lambda case: f"{case.layer}-{case.fault}",
)
def test_tensor_parallel_fault_is_caught(server: RankServer, case: TensorCase) -> None:
    assert_caught(run(server, "tensor_parallel", case, 2))


@pytest.fixture(scope="module")
def one_rank(server: RankServer) -> Reference:
    """The MLA model on one rank, packed."""
    value = assert_ok(run(server, "mla", MlaCase(packed=True), 1)).ranks[0].value
    assert isinstance(value, Reference)
    return value


def test_mla_equals_deepseek(server: RankServer, one_rank: Reference) -> None:
    theirs = assert_ok(run(server, "deepseek", one_rank, 1)).ranks[0].value
    torch.testing.assert_close(one_rank.losses, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [(MlaCase(False), 1), (MlaCase(False), 2), (MlaCase(True), 2), (MlaCase(False, True), 2), (MlaCase(True, True), 2)],
    ids=["batch-1", "batch-tp2", "packed-tp2", "batch-sp2", "packed-sp2"],
)
def test_mla_equals_one_rank(server: RankServer, one_rank: Reference, case: MlaCase, ranks: int) -> None:
    assert_ok(run(server, "mla", replace(case, reference=one_rank), ranks))


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (MlaCase(False, fault="no_causal_mask"), 1),
        (MlaCase(True, fault="wrong_value_width"), 1),
        (MlaCase(True, fault="rotary_key_gradient_unsummed"), 2),
        (MlaCase(True, fault="no_forward_all_reduce"), 2),
        (MlaCase(True, fault="no_backward_all_reduce"), 2),
        (MlaCase(True, True, fault="scatter_without_reduce"), 2),
    ],
    ids=lambda value: value.fault if isinstance(value, MlaCase) else str(value),
)
def test_mla_fault_is_caught(server: RankServer, one_rank: Reference, case: MlaCase, ranks: int) -> None:
    assert_caught(run(server, "mla", replace(case, reference=one_rank), ranks))
