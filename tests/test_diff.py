"""The diff of two result sets: each kind of change is seen, nothing else is, and no text of a stranger gets through raw."""

from __future__ import annotations

import itertools
import json
import math
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from result_sets import HOSTILE, MATRIX, STACK, checks_of, measured, raised, result_set, with_check, with_operator, write

from conformance import parity
from conformance.diff import LADDER, Diff, compare, direction, read_whole, verdict_direction
from conformance.errors import UsageFault
from conformance.report.difference import summary, to_json, to_markdown, to_terminal
from conformance.report.upgrade import upgrade_table
from conformance.results import OUTCOMES, Outcome, Package, ResultSet
from conformance.schema import texts
from conformance.verdict import Verdict

ROWS = MATRIX.rows
GOOD = result_set()
ROOT = Path(__file__).resolve().parents[1]
SCHEMA = jsonschema.Draft202012Validator(json.loads(texts()["diff.schema.json"]))
RENDERERS = (to_terminal, to_markdown, to_json)


def changed(new: ResultSet, old: ResultSet = GOOD) -> Diff:
    """The diff; every rendering of it works and its JSON satisfies the published schema."""
    found = compare(old, new, ROWS)
    SCHEMA.validate(json.loads(to_json(found)))
    assert summary(found) in to_terminal(found)
    return found


def test_a_set_does_not_differ_from_itself() -> None:
    found = changed(GOOD)
    assert (found.checks, found.figures, found.verdicts, found.packages) == ((), (), (), ())
    assert found.compared == len(GOOD.checks) == 2 * 3 * 4
    assert "nothing changed" in to_terminal(found)


def test_the_rule_over_all_pairs_of_outcomes() -> None:
    no_answer: tuple[Outcome, ...] = ("unsupported", "error", "not_run")
    assert set(LADDER) | set(no_answer) == set(OUTCOMES)
    for old, new in itertools.product(OUTCOMES, repeat=2):
        found = direction(old, new)
        if old == new:
            assert found is None
        elif new == "pass":
            assert found == "fixed"
        elif old == "pass":
            assert found == "regressed", "a pass that has no answer now is lost as well"
        elif old in no_answer or new in no_answer:
            assert found == "changed_outcome"
        else:
            assert found == ("regressed" if LADDER.index(new) > LADDER.index(old) else "changed_outcome")
        back = direction(new, old)
        assert not (found == back == "regressed"), "worse in both directions"
        assert not (found == back == "fixed")


def test_the_rule_as_a_user_would_say_it() -> None:
    pairs: dict[tuple[Outcome, Outcome], str] = {
        ("always_on", "crash"): "regressed",
        ("no_effect", "refused"): "regressed",
        ("refused", "fail"): "regressed",  # a clear refusal became wrong numbers
        ("fail", "refused"): "changed_outcome",
        ("crash", "refused"): "changed_outcome",
        ("not_run", "crash"): "changed_outcome",
        ("crash", "pass"): "fixed",
        ("pass", "error"): "regressed",
    }
    assert {pair: direction(*pair) for pair in pairs} == pairs


def test_the_rule_for_all_pairs_of_verdicts() -> None:
    for old, new in itertools.product(Verdict, repeat=2):
        found = verdict_direction(old, new)
        assert (found is None) == (old is new)
        if old.green != new.green:
            assert found == ("fixed" if new.green else "regressed")
    assert verdict_direction(Verdict.WORKS, Verdict.WITH_COMPANIONS) == "changed_outcome"
    assert verdict_direction(Verdict.ALWAYS_ON, Verdict.BROKEN) == "regressed"
    assert verdict_direction(Verdict.REFUSED, Verdict.WRONG_NUMBERS) == "regressed"
    assert verdict_direction(Verdict.WRONG_NUMBERS, Verdict.NOT_RUN) == "changed_outcome"


def test_a_regression_and_its_repair() -> None:
    broken = with_check(GOOD, "tp", "ref", "engaged", outcome="crash", summary="TypeError: no", exception=raised())
    found = changed(broken)
    (check,) = found.checks
    assert (check.change, check.row, check.role, check.check) == ("regressed", "tp", "ref", "engaged")
    assert [(v.row, v.role, v.change, v.old, v.new) for v in found.verdicts] == [("tp", "ref", "regressed", "works", "broken")]
    back = changed(GOOD, broken)
    assert [c.change for c in back.checks] == ["fixed"]
    assert [v.change for v in back.verdicts] == ["fixed"]


def test_the_same_outcome_for_another_reason() -> None:
    def crash(kind: str, message: str, frame: str = "a.py:1 f") -> ResultSet:
        fields = {"outcome": "crash", "summary": f"{kind}: {message}", "exception": raised(kind, message, frame)}
        return with_check(GOOD, "tp", "actor", "engaged", **fields)

    old = crash("TypeError", "unexpected keyword 'tp_group'")
    for new in (crash("ValueError", "unexpected keyword 'tp_group'"), crash("TypeError", "unexpected keyword 'cp_group'")):
        assert [c.change for c in changed(new, old).checks] == ["changed_reason"]
    assert not changed(crash("TypeError", "unexpected keyword 'tp_group'", "a.py:9 f"), old).checks, "only a line moved"
    one, other = (crash("TypeError", f"<Thing object at 0x7f{i}ab12cd>") for i in "12")
    assert not changed(other, one).checks, "an address is no reason"
    wide = with_check(GOOD, "tp", "actor", "accepted", summary="written + or ++")
    assert [c.change for c in changed(wide).checks] == ["changed_reason"]


def test_new_and_gone() -> None:
    fewer = replace(GOOD, checks=GOOD.checks[1:])
    found = changed(fewer)
    assert [(c.change, c.new, c.old) for c in found.checks] == [("gone", None, "pass")]
    assert found.compared == len(GOOD.checks) - 1
    found = changed(GOOD, fewer)
    assert [(c.change, c.new, c.old) for c in found.checks] == [("new", "pass", None)]


def parity_set(detail: dict[str, object], outcome: str = "pass") -> ResultSet:
    return with_check(GOOD, "tp", "actor", "parity", "float32", detail=detail, outcome=outcome)


def moved(old: dict[str, object], new: dict[str, object]) -> bool:
    return bool(changed(parity_set(new), parity_set(old)).figures)


def test_a_figure_moves_by_more_than_a_quarter_of_its_bound_or_not_at_all() -> None:
    just_above = math.nextafter(2.0, 3.0)
    assert not moved(measured(1.0), measured(1.0))
    assert not moved(measured(1.0), measured(2.0)), "exactly one standard deviation"
    assert not moved(measured(2.0), measured(1.0))
    assert moved(measured(1.0), measured(just_above))
    assert moved(measured(just_above), measured(1.0)), "better is a move as well"
    assert moved(measured(0.0, 0.0), measured(1e-9, 0.0)), "bitwise has no noise"
    assert moved(measured(1.0), measured("nan"))
    assert not moved(measured("nan"), measured("nan"))
    assert moved(measured("inf"), measured("nan"))
    assert not moved(measured(1.0), measured(1.0, quantity="entropy")), "of one side alone: nothing to compare"
    assert not moved(measured(1.0, "inf"), measured(1.5, 4.0))


def test_figures_that_no_program_can_read_are_said_to_be_missing() -> None:
    for detail in ({}, {"figures": {"log_probs": "1e-7"}}, {"measured": {"log_probs": 3}}, {"measured": [1]}, {"measured": {}}):
        found = changed(parity_set(detail), parity_set(measured(1.0)))
        assert not found.figures
        assert any("not compared" in note for note in found.notes), detail
    both = [replace(r, detail=measured(1.0)) for r in GOOD.checks]
    assert not changed(result_set(both), result_set(both)).notes


def test_figures_of_one_side_are_counted_and_those_that_are_gone_are_named() -> None:
    both = {"measured": {**measured(1.0)["measured"], **measured(1.0, quantity="loss")["measured"]}}
    cases = [(both, both, 0, 0), (both, measured(1.0), 1, 0), (measured(1.0), measured(1.0, quantity="entropy"), 2, 1)]
    for old, new, alone, gone in cases:
        found = changed(parity_set(new), parity_set(old))
        assert [note for note in found.notes if "one side only" in note] == (
            [f"{alone} figures are on one side only, by their names: not compared"] if alone else []
        )
        assert [(g.row, g.role, g.precision, g.quantities) for g in found.figures_gone] == [
            ("tp", "actor", "float32", ("log_probs",))
        ] * gone
        assert ("nothing changed" in summary(found)) == (not gone)
        for text in (to_terminal(found), to_markdown(found)):
            assert ("Figures that are gone" in text) == bool(gone)
    failed = changed(parity_set({}, "fail"), parity_set(measured(1.0)))
    assert failed.figures_gone == (), "it regressed, which says more"


def test_a_parity_check_writes_what_the_diff_reads() -> None:
    for difference in (1.0, math.inf, math.nan):
        figure = parity.Figure("log_probs", difference, 4.0, "sequence 0")
        old = {"measured": {"log_probs": figure.measured()}}
        assert not moved(old, old)
        assert moved(old, measured(3.0))


def test_operators() -> None:
    good = with_operator(GOOD, "pass")
    assert changed(good, good).operators == ()
    for old, new, wanted in [
        (good, with_operator(GOOD, "fail", HOSTILE), "regressed"),
        (with_operator(GOOD, "fail"), good, "fixed"),
        (good, GOOD, "gone"),
        (GOOD, good, "new"),
    ]:
        found = changed(new, old)
        assert [(o.family, o.change) for o in found.operators] == [("rms_norm", wanted)]
        assert found.checks == ()
        assert f"{wanted}: rms_norm" in to_terminal(found)
        assert "1 operator families" in summary(found)
    one, other = (with_operator(GOOD, "fail", text) for text in "ab")
    assert changed(other, one).operators == (), "another generated input is no news"


def test_packages_that_moved() -> None:
    stack = (Package("verl", "0.9.2"), Package("megatron_core", "0.16.1"), STACK[2], Package("mindspeed", "r", None, "abc"))
    found = changed(result_set(stack=stack))
    old_new = {move.name: (move.old and move.old.version, move.new and move.new.version) for move in found.packages}
    assert old_new["verl"] == ("0.9.1", "0.9.2")
    assert old_new["mindspeed"] == (None, "r")
    assert "torch" not in old_new
    assert "r (abc)" in to_terminal(found)
    assert "packages of the new run only: mindspeed" in found.notes
    assert "packages of the old run only: torch" in changed(result_set(stack=STACK[:2])).notes
    elsewhere = changed(result_set(stack=(replace(STACK[0], path="x/verl"), *STACK[1:])))
    assert "at x/verl" in to_terminal(elsewhere)


def test_what_makes_two_sets_hard_to_compare_is_said() -> None:
    other = result_set(device="npu", backend="plain", route="worker", matrix_sha256="1" * 64)
    notes = "\n".join(changed(other).notes)
    routes = "the ways through verl differ: engine and worker"
    for words in (
        routes,
        "the matrices differ",
        "the devices differ: emulated and npu",
        "the backends differ: mindspeed and plain",
    ):
        assert words in notes
        assert words in to_terminal(changed(other))
    strange = [replace(r, row="abc") for r in checks_of(MATRIX["tp"])]
    found = changed(result_set(strange, rows=("abc",)), result_set(strange, rows=("abc",)))
    assert any("not in this matrix.yaml, so without a verdict: abc" in note for note in found.notes)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s: replace(s, footer=None), "interrupted"),
        (lambda s: replace(s, header=replace(s.header, complete_selection=False)), "some rows or checks only"),
    ],
)
def test_incomplete_and_partial_sets_are_refused(tmp_path: Path, spoil: Callable[[ResultSet], ResultSet], words: str) -> None:
    directory = write(spoil(GOOD), tmp_path / "set")
    with pytest.raises(UsageFault, match=words) as caught:
        read_whole(directory)
    assert len(str(caught.value).splitlines()) == 1
    assert read_whole(write(GOOD, tmp_path / "good")).checks == GOOD.checks


@pytest.mark.parametrize("render", RENDERERS)
def test_hostile_text_is_shown_and_does_nothing(render: Callable[[Diff], str]) -> None:
    fields = {"outcome": "crash", "summary": HOSTILE, "exception": raised(HOSTILE, HOSTILE)}
    bad = with_check(GOOD, "tp", "actor", "engaged", **fields)
    bad = replace(bad, header=replace(bad.header, stack=(Package("x" + HOSTILE, HOSTILE, HOSTILE, HOSTILE),), started=HOSTILE))
    page = render(compare(GOOD, bad, ROWS))
    if render is to_json:
        assert json.loads(page)["checks"][0]["new_reason"] == HOSTILE
        return
    raw = [c for c in page if unicodedata.category(c)[0] == "C" and c != "\n"]
    assert not raw
    assert "bold" in page
    if render is to_markdown:
        assert "\\<script\\>" in page
        assert "<script>" not in page.replace("\\<", "")


def test_the_upgrade_table_says_what_makes_its_sides_hard_to_compare() -> None:
    with_figures = result_set([replace(r, detail=measured(1.0)) for r in GOOD.checks])
    assert "Note" not in upgrade_table(with_figures, with_figures, ROWS)
    other = result_set(matrix_sha256="1" * 64, route="worker", stack=(*STACK[:2], Package("x" + HOSTILE, "1")))
    page = upgrade_table(with_figures, other, ROWS)
    notes = [line for line in page.splitlines() if line.startswith("- Note: ")]
    assert notes[:3] == [
        "- Note: the matrices differ: the two runs did not test the same thing.",
        "- Note: the ways through verl differ: engine and worker.",
        "- Note: packages of the old run only: torch.",
    ]
    assert notes[3].startswith("- Note: packages of the new run only: xa")
    assert "<script>" not in page.replace("\\<", "")


def test_the_committed_reports_compare() -> None:
    plain, mindspeed = (read_whole(next(ROOT.glob(f"reports/verl*-{name}-emulated"))) for name in ("plain", "mindspeed"))
    for old, new in itertools.product((plain, mindspeed), repeat=2):
        found = changed(new, old)
        assert found.compared == len({r.name for r in old.checks} & {r.name for r in new.checks})
        assert bool(found.checks) == (old is not new)
    assert any("the backends differ" in note for note in changed(mindspeed, plain).notes)
