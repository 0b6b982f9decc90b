"""The plain backend over ranks: context-parallel attention, and megatron-core's tensor-parallel layers on top of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from plain_targets import BOUND, Case

from conformance import plain
from conformance.errors import UsageFault
from conformance.ranks import Job, RankServer

pytestmark = pytest.mark.stack

CASES = {
    "packed": Case("thd", "padding_causal", (8, 16, 8), (8, 16, 8)),
    "spaced": Case("thd", "padding_causal", (5, 16, 3), (8, 16, 8)),
    "full": Case("thd", "padding", (5, 16, 3), (8, 16, 8)),
    "sbhd": Case("sbhd", "causal", (16, 16), (16, 16)),
    "bshd": Case("bshd", "no_mask", (16, 16), (16, 16)),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer("plain_targets:preload", env={"OMP_NUM_THREADS": "1"}) as server:
        yield server


def worst(server: RankServer, target: str, payload: object, ranks: int) -> float:
    """The largest gap of any rank."""
    report = server.run(Job(target, target, payload, ranks, 60))
    assert report.ok, (report.reason, report.ranks[report.failed_first or 0].raised)
    gaps = [rank.value for rank in report.ranks]
    assert len(gaps) == ranks
    return max(gap for gap in gaps if isinstance(gap, float))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_context_parallel_attention(server: RankServer, name: str, ranks: int) -> None:
    assert worst(server, "plain_targets:context_attention", CASES[name], ranks) < BOUND


@pytest.mark.parametrize("fault", ["layout", "unsummed"])
@pytest.mark.parametrize("name", ["spaced", "sbhd"])
def test_context_parallel_attention_with_planted_faults(server: RankServer, name: str, fault: str) -> None:
    case = CASES[name]
    planted = Case(case.layout, case.mask_type, case.lengths, case.room, fault)
    assert worst(server, "plain_targets:context_attention", planted, 2) > 1000 * BOUND


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_layers(server: RankServer, sequence_parallel: bool, normalization: str) -> None:
    faults = ("shard", "norm") if sequence_parallel else ("shard",)
    assert worst(server, "plain_megatron_targets:tensor_parallel_mlp", (sequence_parallel, normalization, None), 2) < BOUND
    for fault in faults:
        assert (
            worst(server, "plain_megatron_targets:tensor_parallel_mlp", (sequence_parallel, normalization, fault), 2)
            > 1000 * BOUND
        )


def test_megatron_core_takes_it_for_transformer_engine(server: RankServer) -> None:
    facts = server.run(Job("facts", "plain_targets:facts", None, 1, 30)).ranks[0].value
    assert isinstance(facts, dict)
    assert Path(facts["file"]).is_relative_to(plain.PATH)
    assert facts["have_te"] == (True, True)
    assert facts["version"] == "2.2.0"
    assert facts["attention"] == "TEDotProductAttention"
    assert "transformer_engine.pytorch.attention" in facts["bases"]
    assert facts["experts"] == "TEGroupedMLP"


def test_activate_puts_the_package_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    plain.activate()
    plain.activate()
    assert sys.path[0] == str(plain.PATH)
    assert sys.path.count(str(plain.PATH)) == 1


def test_activate_refuses_an_installed_transformer_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageFault, match="transformer_engine is"):
        plain.activate()
    assert str(plain.PATH) not in sys.path
    assert not isinstance(sys.modules.get("transformer_engine"), ModuleType)
