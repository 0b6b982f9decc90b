"""The plain backend says no where it must, and does not fall into the traps that megatron-core and verl lay for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from plain_targets import BOUND

from conformance import plain
from conformance.errors import UsageFault
from conformance.ranks import Job, JobReport, RankServer

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer("plain_targets:preload", env={"OMP_NUM_THREADS": "1"}) as server:
        yield server


def report_of(server: RankServer, target: str, payload: object = None, ranks: int = 1) -> JobReport:
    return server.run(Job(target, f"plain_strict_targets:{target}", payload, ranks, 60))


def run(server: RankServer, target: str, payload: object = None, ranks: int = 1) -> list[Any]:
    report = report_of(server, target, payload, ranks)
    assert report.ok, (report.reason, report.ranks[report.failed_first or 0].raised)
    return [rank.value for rank in report.ranks]


MAKING = [
    ("Linear", {"fuse_wgrad_accumulation": True}),
    ("Linear", {"ub_overlap_ag": True}),
    ("Linear", {"ub_bulk_wgrad": True}),
    ("Linear", {"parameters_split": ("query", "key")}),
    ("Linear", {"parallel_mode": "diagonal"}),
    ("Linear", {"device": "meta"}),
    ("LayerNormLinear", {"normalization": "L2Norm"}),
    ("LayerNormLinear", {"parallel_mode": "row"}),
    ("LayerNormLinear", {"fuse_wgrad_accumulation": True}),
    ("GroupedLinear", {"tp_size": 2}),
    ("GroupedLinear", {"fuse_wgrad_accumulation": True}),
    ("DotProductAttention", {"window_size": (4, 0)}),
    ("DotProductAttention", {"cp_comm_type": "a2a+p2p"}),
    ("DotProductAttention", {"attn_mask_type": "alibi"}),
    ("DotProductAttention", {"attention_type": "sideways"}),
]


@pytest.mark.parametrize(("kind", "arguments"), MAKING, ids=lambda x: x if isinstance(x, str) else next(iter(x)))
def test_what_is_not_honoured_is_refused_by_name(server: RankServer, kind: str, arguments: dict[str, Any]) -> None:
    [(error, text)] = run(server, "refusal", (kind, arguments))
    [(name, value)] = arguments.items()
    assert error == "PlainBackendError"
    assert f"{name}={value!r}" in text
    assert kind in text or kind.endswith("Linear")  # the maker of weights is shared


def test_what_is_not_known_is_not_swallowed(server: RankServer) -> None:
    for kind in ("Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention", "RMSNorm"):
        assert run(server, "refusal", (kind, {"novelty": 1}))[0][0] in ("TypeError", "PlainBackendError")
        assert run(server, "refusal", (kind, {})) == [("", "")]


THD = {"qkv_format": "thd", "cu_seqlens_q": [0, 4], "cu_seqlens_kv": [0, 4]}
MASK = [[[[False] * 4] * 4]]
IN_FORWARD = [
    ({}, {"attention_mask": MASK, "attn_mask_type": "no_mask"}, "attention_mask"),
    ({}, {**THD, "attn_mask_type": "padding", "attention_mask": MASK}, "attention_mask"),
    ({}, {**THD, "attn_mask_type": "arbitrary"}, "attn_mask_type"),
    (
        {},
        {"attention_mask": [[False] * 4]},
        "attention_mask",
    ),  # polarity of (batch, tokens) masks is the other way round
    ({}, {"qkv_format": "bs3hd"}, "qkv_format"),
    ({}, {"checkpoint_core_attention": True}, "checkpoint_core_attention"),
    ({}, {"core_attention_bias_type": "alibi"}, "core_attention_bias_type"),
    ({}, {"core_attention_bias": MASK}, "core_attention_bias"),
    ({}, {"window_size": (1, 1)}, "window_size"),
    ({"attention_dropout": 0.1}, {}, "attention_dropout"),
]


@pytest.mark.parametrize(("made", "given", "name"), IN_FORWARD, ids=[f"{n}{i}" for i, (_, _, n) in enumerate(IN_FORWARD)])
def test_forward_refuses_by_name(server: RankServer, made: dict[str, Any], given: dict[str, Any], name: str) -> None:
    [(error, text)] = run(server, "refusal_in_forward", (made, given, True))
    assert error == "PlainBackendError"
    assert "DotProductAttention" in text
    assert f"{name}=" in text


def test_forward_takes_the_rest(server: RankServer) -> None:
    assert run(server, "refusal_in_forward", ({}, {"attention_mask": MASK, "max_seqlen_q": 4}, True)) == [("", "")]
    assert run(server, "refusal_in_forward", ({}, {**THD, "attn_mask_type": "padding"}, True)) == [("", "")]
    # Dropout does nothing in evaluation: reference log-probs must come out.
    assert run(server, "refusal_in_forward", ({"attention_dropout": 0.1}, {}, False)) == [("", "")]


@pytest.mark.parametrize(
    "name",
    [
        "pytorch.fp8_autocast",
        "pytorch.fp8_model_init",
        "pytorch.fp8.FP8GlobalStateManager.get_fp8_recipe",
        "pytorch.distributed.checkpoint",
        "pytorch.distributed.activation_recompute_forward",
        "pytorch.distributed.get_all_rng_states",
        "pytorch.distributed.CudaRNGStatesTracker",
        "pytorch.ops.Sequential",
        "pytorch.ops.SwiGLU",
        "pytorch.tensor.QuantizedTensor",
        "common.recipe.DelayedScaling",
    ],
)
def test_names_that_megatron_core_needs_are_there_and_refuse(server: RankServer, name: str) -> None:
    assert run(server, "refusal_of_name", name) == ["PlainBackendError"]


def test_nan_in_padding_stays_there(server: RankServer) -> None:
    assert run(server, "nan_padding")[0] < BOUND
    assert run(server, "nan_padding", "padding") == [float("inf")]


def test_a_weight_that_is_the_same_on_all_tp_ranks_counts_once(server: RankServer) -> None:
    assert run(server, "counted_in_grad_norm") == [{"data-parallel-rng": False, "expert-parallel-rng": True}]


@pytest.mark.parametrize("transposed", [False, True])
def test_gradient_is_summed_for_any_layout_of_the_input(server: RankServer, transposed: bool) -> None:
    assert max(run(server, "column_input_layout", (transposed, None), 2)) < BOUND
    assert min(run(server, "column_input_layout", (transposed, "unsummed"), 2)) > 1000 * BOUND


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_returned_norm(server: RankServer, sequence_parallel: bool, gathered: bool) -> None:
    assert max(run(server, "returned_norm", (sequence_parallel, gathered, None), 2)) < BOUND
    assert min(run(server, "returned_norm", (sequence_parallel, gathered, "summed"), 2)) > 1000 * BOUND


def test_context_parallelism_takes_the_mask_that_verl_gives(server: RankServer) -> None:
    assert max(run(server, "context_padding", None, 2)) < BOUND
    report = report_of(server, "context_padding", "more", 2)
    raised = report.ranks[report.failed_first or 0].raised
    assert raised is not None
    assert raised.type.endswith("PlainBackendError")


def test_context_parallelism_can_be_turned_off(server: RankServer) -> None:
    assert max(run(server, "context_parallel_off", None, 2)) < BOUND
    assert not report_of(server, "context_parallel_off", "on", 2).ok


def test_experts_can_be_saved(server: RankServer) -> None:
    assert run(server, "expert_checkpoint") == [["_extra_state", "_extra_state1", "weight0", "weight1"]]


def test_activate_refuses_a_stub_without_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = ModuleType("transformer_engine")  # what MindSpeed puts there
    monkeypatch.setitem(sys.modules, "transformer_engine", stub)
    with pytest.raises(UsageFault, match="transformer_engine"):
        plain.activate()
