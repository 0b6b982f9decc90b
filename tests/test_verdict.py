"""Verdicts over every combination of outcomes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from conformance.matrix import Row, load_matrix
from conformance.results import CHECKS, OUTCOMES, Check, CheckRecord, Outcome, Precision, UpstreamException
from conformance.verdict import Conclusion, Verdict, blame, conclude, of_check, of_variant, whose

MATRIX = load_matrix()
ANY: tuple[Outcome | None, ...] = (*OUTCOMES, None)  # None: there is no record


def record(check: Check, outcome: Outcome, variant: str = "documented") -> CheckRecord:
    precision = "float32" if check == "parity" else None
    return CheckRecord("x", "actor", variant, check, precision, outcome, "")  # type: ignore[arg-type]


def records(outcomes: tuple[Outcome | None, ...], variant: str = "documented") -> list[CheckRecord]:
    return [record(c, o, variant) for c, o in zip(CHECKS, outcomes, strict=True) if o is not None]


def verdict_of(row: Row, *outcomes: tuple[Outcome | None, ...]) -> Conclusion:
    names = row.variant_names
    return conclude(row, [r for n, o in zip(names, outcomes, strict=False) for r in records(o, n)], ["float32"])


def test_one_spelling_over_all_combinations() -> None:
    seen: set[Verdict] = set()
    for outcomes in itertools.product(ANY, repeat=3):
        verdict = verdict_of(MATRIX["tp"], outcomes).verdict
        seen.add(verdict)
        assert verdict.green == (outcomes == ("pass", "pass", "pass")), outcomes
        assert (verdict is Verdict.ERROR) == ("error" in outcomes), outcomes
        if "crash" in outcomes and "error" not in outcomes:
            assert verdict is Verdict.BROKEN
        assert of_variant(reversed(records(outcomes)), ["float32"]) is verdict, "the order of records must not matter"
    assert seen == set(Verdict) - {Verdict.WITH_COMPANIONS, Verdict.OTHER_SPELLING}


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [
        (("pass", "pass", "pass"), Verdict.WORKS),
        (("refused", "not_run", "not_run"), Verdict.REFUSED),
        (("fail", "not_run", "not_run"), Verdict.REFUSED),
        (("pass", "always_on", "pass"), Verdict.ALWAYS_ON),
        (("pass", "no_effect", "pass"), Verdict.NO_EFFECT),
        (("pass", "no_effect", "not_run"), Verdict.NO_EFFECT),
        (("pass", "no_effect", "fail"), Verdict.WRONG_NUMBERS),
        (("pass", "crash", "not_run"), Verdict.BROKEN),
        (("pass", "fail", "pass"), Verdict.BROKEN),
        (("pass", "pass", "fail"), Verdict.WRONG_NUMBERS),
        (("pass", "not_run", "not_run"), Verdict.NOT_RUN),
        (("pass", "pass", "unsupported"), Verdict.NOT_APPLICABLE),
        (("pass", "not_run", "unsupported"), Verdict.NOT_RUN),
        (("pass", "unsupported", "crash"), Verdict.BROKEN),
        (("pass", "pass", None), Verdict.NOT_RUN),
        ((None, None, None), Verdict.NOT_RUN),
        (("refused", "error", "crash"), Verdict.ERROR),
    ],
)
def test_one_spelling(outcomes: tuple[Outcome | None, ...], wanted: Verdict) -> None:
    assert verdict_of(MATRIX["tp"], outcomes).verdict is wanted


def test_a_precision_that_was_asked_for_and_not_run_is_not_green() -> None:
    good = records(("pass", "pass", "pass"))
    assert of_variant(good, ["float32"]) is Verdict.WORKS
    assert of_variant(good, ["float32", "bfloat16"]) is Verdict.NOT_RUN
    bad = replace(good[2], precision="bfloat16", outcome="fail")
    assert of_variant([*good, bad], ["float32", "bfloat16"]) is Verdict.WRONG_NUMBERS


def test_two_spellings_over_all_combinations() -> None:
    row = MATRIX["swap-optimizer"]
    everything = list(itertools.product(ANY, repeat=3))
    # One combination for each verdict stands for the second spelling's others: the first test ran them all.
    one_each = {of_variant(records(outcomes), ["float32"]): outcomes for outcomes in reversed(everything)}
    for first, second in itertools.product(everything, one_each.values()):
        conclusion = verdict_of(row, first, second)
        alone = verdict_of(MATRIX["tp"], first).verdict
        if "error" in (*first, *second):
            assert conclusion.verdict is Verdict.ERROR
        elif second == ("pass", "pass", "pass") and alone not in (Verdict.WORKS, Verdict.NOT_RUN):
            assert (conclusion.verdict, conclusion.variant) == (Verdict.WITH_COMPANIONS, "effective")
        else:
            assert (conclusion.verdict, conclusion.variant) == (alone, "documented"), (first, second)


def test_a_variant_that_works_is_named_by_how_it_differs() -> None:
    good: tuple[Outcome, ...] = ("pass", "pass", "pass")
    idle: tuple[Outcome, ...] = ("pass", "no_effect", "pass")
    for row, wanted in [
        ("swap-optimizer", Verdict.WITH_COMPANIONS),
        ("mc2", Verdict.WITH_COMPANIONS),
        ("permute", Verdict.OTHER_SPELLING),
        ("recompute", Verdict.OTHER_SPELLING),
    ]:
        conclusion = verdict_of(MATRIX[row], idle, good)
        assert conclusion.verdict is wanted, row
        assert conclusion.by_variant["documented"] is Verdict.NO_EFFECT
    assert verdict_of(MATRIX["recompute"], good, ("pass", "crash", None)).verdict is Verdict.WORKS


def test_a_documented_spelling_with_companions_says_so() -> None:
    row = MATRIX["swap-optimizer"]
    companions = row.spelling("effective").companions
    row = row.model_copy(update={"documented": row.documented.model_copy(update={"companions": companions})})
    assert verdict_of(row, ("pass", "pass", "pass")).verdict is Verdict.WITH_COMPANIONS


def test_every_outcome_of_every_check_has_a_verdict() -> None:
    for check, outcome in itertools.product(CHECKS, OUTCOMES):
        assert of_check(check, outcome).green == (outcome == "pass")


def raising(outcome: Outcome, owner: str | None, **detail: Any) -> CheckRecord:
    exception = UpstreamException("ValueError", "no", "file.py:1 f", owner) if owner else None
    return replace(record("engaged", outcome), exception=exception, detail=detail)


def test_blame() -> None:
    for ours, plain in itertools.product(OUTCOMES, OUTCOMES):
        found = blame(record("engaged", ours), record("engaged", plain))
        if ours not in ("fail", "refused", "crash") or plain not in ("pass", ours):
            assert found is None, (ours, plain)
        else:
            assert found == ("MindSpeed" if plain == "pass" else "verl or megatron-core")
    assert blame(raising("crash", "bridge"), raising("crash", "bridge")) == "bridge"
    another = replace(raising("crash", "bridge"), exception=UpstreamException("KeyError", "no", "file.py:1 f", "bridge"))
    assert blame(raising("crash", "MindSpeed"), another) is None, "two failures: the one does not explain the other"
    assert blame(raising("crash", "MindSpeed"), raising("crash", None)) is None


def test_whose_failure() -> None:
    assert whose([record("engaged", "pass"), record("parity", "no_effect")]) is None
    assert whose([record("engaged", "pass"), raising("crash", "verl")]) == "verl"
    assert whose([raising("refused", "MindSpeed", whose="bridge"), raising("crash", "verl")]) == "bridge"
    assert whose([raising("refused", "MindSpeed", whose=None)]) == "MindSpeed"
    assert whose([raising("fail", None)]) is None


def test_parity_in_one_precision_is_enough_where_the_other_cannot_be() -> None:
    row = MATRIX["tp"]
    records = [record("accepted", "pass"), record("engaged", "pass"), record("parity", "unsupported")]
    other = replace(record("parity", "pass"), precision="bfloat16")
    both: tuple[Precision, ...] = ("float32", "bfloat16")
    assert conclude(row, [*records, other], both).verdict is Verdict.WORKS
    assert conclude(row, [*records, replace(other, outcome="crash")], both).verdict is Verdict.BROKEN
    assert conclude(row, [*records, replace(other, outcome="unsupported")], both).verdict is Verdict.NOT_APPLICABLE


def test_a_precision_that_the_row_is_not_for_has_no_say() -> None:
    row = MATRIX["mla"]
    records = [record("accepted", "pass"), record("engaged", "pass")]
    records = [replace(r, row="mla") for r in records]
    parity = replace(record("parity", "pass"), row="mla", precision="bfloat16")
    other = replace(parity, precision="float32", outcome="unsupported")
    both: tuple[Precision, ...] = ("float32", "bfloat16")
    assert conclude(row, [*records, parity, other], both).verdict is Verdict.WORKS
    assert conclude(row, [*records, other], both).verdict is Verdict.NOT_RUN
    assert conclude(row, [*records, replace(parity, outcome="fail")], both).verdict is Verdict.WRONG_NUMBERS
