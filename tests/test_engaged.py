"""engaged: two-sided judgement of what ran, on made-up facts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.engaged import differing, holds_on, judge
from conformance.matrix import Evidence
from conformance.probes import Fact, Facts

OPS = Evidence.model_validate({"fact": "ops.npu_swiglu", "on": "> 0", "off": "== 0"})
GROUP = Evidence.model_validate({"fact": "groups.tp", "on": "== 2", "off": "== 1"})
SMALLER = Evidence.model_validate({"fact": "optimizer.shard_elements", "change": "<"})
CLASS = Evidence.model_validate({"fact": "optimizer.class", "on": "== a.B", "off": "!= a.B"})
ANY = Evidence.model_validate({"fact": "collectives.pp.send", "on": "> 0", "off": "== 0", "ranks": "any"})


def ranks(*facts: Facts) -> list[Facts]:
    return list(facts)


def test_pass_is_on_as_promised_and_off_without() -> None:
    judgement = judge([OPS], ranks({"ops.npu_swiglu": 8}), ranks({}))
    assert judgement.outcome == "pass"
    assert [line[:8] for line in judgement.lines] == ["yes [on]", "yes [off"]


def test_always_on_when_nothing_differs() -> None:
    same: Facts = {"ops.npu_swiglu": 8}
    judgement = judge([OPS], ranks(same), ranks(dict(same)))
    assert judgement.outcome == "always_on"
    assert "cannot be switched off" in judgement.summary


def test_always_on_when_only_something_else_differs() -> None:
    on: Facts = {"ops.npu_swiglu": 8, "ops.npu_rms_norm": 4}
    judgement = judge([OPS], ranks(on), ranks({"ops.npu_swiglu": 8}))
    assert judgement.outcome == "always_on"
    assert "with it off, too" in judgement.summary


def test_no_effect_when_nothing_differs_and_the_evidence_is_missing() -> None:
    assert judge([OPS], ranks({"ops.npu_rms_norm": 1}), ranks({"ops.npu_rms_norm": 1})).outcome == "no_effect"


def test_a_read_is_no_effect() -> None:
    on: Facts = {"reads.use_fused_swiglu": 3}
    assert judge([OPS], ranks(on), ranks({"reads.use_fused_swiglu": 1})).outcome == "no_effect"


def test_fail_when_something_else_changes_and_names_it() -> None:
    judgement = judge([OPS], ranks({"ops.npu_rms_norm": 4}), ranks({}))
    assert judgement.outcome == "fail"
    assert "ops.npu_rms_norm on rank 0: 4 (off: 0)" in judgement.summary


def test_fail_when_the_evidence_is_upside_down() -> None:
    assert judge([OPS], ranks({}), ranks({"ops.npu_swiglu": 8})).outcome == "fail"


def test_one_piece_of_evidence_that_is_missing_is_enough_to_fail() -> None:
    on: Facts = {"ops.npu_swiglu": 8, "groups.tp": 1}
    judgement = judge([OPS, GROUP], ranks(on), ranks({"groups.tp": 1}))
    assert judgement.outcome == "fail"
    assert sum(line.startswith("NO") for line in judgement.lines) == 1


@pytest.mark.parametrize(
    ("on", "off", "outcome"),
    [
        ((4.0, 4.0), (8.0, 8.0), "pass"),
        ((8.0, 8.0), (8.0, 8.0), "no_effect"),
        ((4.0, 8.0), (8.0, 8.0), "fail"),  # rank 1 has not got less
        ((9.0, 9.0), (8.0, 8.0), "fail"),
    ],
)
def test_a_change_is_judged_rank_by_rank(on: tuple[float, ...], off: tuple[float, ...], outcome: str) -> None:
    fact = "optimizer.shard_elements"
    assert judge([SMALLER], [{fact: v} for v in on], [{fact: v} for v in off]).outcome == outcome


def test_a_change_alone_never_says_always_on() -> None:
    # Nothing states what the feature looks like, so its being there with the key off cannot be told.
    facts = ranks({"optimizer.shard_elements": 4})
    assert not holds_on([SMALLER], facts)
    assert judge([SMALLER], facts, facts).outcome == "no_effect"


def test_evidence_must_be_there_on_every_rank() -> None:
    on = ranks({"ops.npu_swiglu": 8}, {})
    assert judge([OPS], on, ranks({}, {})).outcome == "fail"


def test_any_rank_is_enough_where_the_row_says_so_but_off_means_every_rank() -> None:
    on = ranks({"collectives.pp.send": 4}, {})
    assert judge([ANY], on, ranks({}, {})).outcome == "pass"
    assert judge([ANY], on, ranks({}, {"collectives.pp.send": 1})).outcome != "pass"


def test_text_facts() -> None:
    assert judge([CLASS], ranks({"optimizer.class": "a.B"}), ranks({"optimizer.class": "a.C"})).outcome == "pass"
    assert judge([CLASS], ranks({"optimizer.class": "a.B"}), ranks({"optimizer.class": "a.B"})).outcome == "always_on"


def test_no_rank_is_no_evidence() -> None:
    assert judge([OPS], [], []).outcome == "no_effect"


def test_no_evidence_is_no_pass() -> None:
    assert judge([], ranks({}), ranks({})).outcome == "no_effect"
    assert judge([], ranks({"groups.tp": 2}), ranks({"groups.tp": 1})).outcome == "fail"


def test_differing_counts_an_absent_fact_as_none() -> None:
    assert differing(ranks({"ops.a": 0}), ranks({})) == []
    assert differing(ranks({"ops.a": 1}), ranks({})) == ["ops.a on rank 0: 1 (off: 0)"]
    assert differing(ranks({}, {}), ranks({}, {"ops.a": 2})) == ["ops.a on rank 1: 0 (off: 2)"]


def test_runs_of_unequal_size_are_never_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        judge([SMALLER], ranks({}, {}), ranks({}))
    with pytest.raises(ValueError, match="zip"):
        differing(ranks({}), ranks({}, {}))


NAMES = ["ops.npu_swiglu", "groups.tp", "optimizer.shard_elements", "collectives.pp.send", "optimizer.class"]
VALUES: st.SearchStrategy[Fact] = st.one_of(st.integers(0, 3), st.sampled_from(["a.B", "a.C"]))
FACTS = st.dictionaries(st.sampled_from(NAMES), VALUES)
EVIDENCE = st.lists(st.sampled_from([OPS, GROUP, SMALLER, ANY, CLASS]), max_size=3)


@given(data=st.data(), evidence=EVIDENCE, size=st.integers(0, 3))
def test_never_passes_unless_both_sides_hold(data: st.DataObject, evidence: list[Evidence], size: int) -> None:
    on, off = (data.draw(st.lists(FACTS, min_size=size, max_size=size)) for _ in range(2))
    judgement = judge(evidence, on, off)
    verdicts = []
    for item in evidence:
        there, absent = [f.get(item.fact) for f in on], [f.get(item.fact) for f in off]
        verdicts += [item.judge_on(there), item.judge_off(absent), item.judge_change(there, absent)]
    stated = [verdict.holds for verdict in verdicts if verdict is not None]
    assert (judgement.outcome == "pass") == (bool(stated) and all(stated))
    assert len(judgement.lines) == len(stated)
    if judgement.outcome == "no_effect":
        assert not differing(on, off)
    if judgement.outcome == "always_on":
        assert holds_on(evidence, off)


@given(facts=st.lists(FACTS, min_size=1, max_size=3), evidence=EVIDENCE)
def test_equal_runs_never_pass(facts: list[Facts], evidence: list[Evidence]) -> None:
    assert judge(evidence, facts, facts).outcome in ("no_effect", "always_on")
