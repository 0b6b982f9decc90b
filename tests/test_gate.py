"""The gate: what turns it red, what a waiver covers and until when, and a policy file from a stranger."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from result_sets import MATRIX, measured, result_set, with_check, with_operator

from conformance.diff import compare
from conformance.errors import UsageFault
from conformance.gate import Judgement, Policy, Waiver, judge, lines, load_policy
from conformance.results import Outcome, ResultSet
from conformance.schema import texts

TODAY = datetime.date(2026, 9, 1)
GOOD = result_set()
CRASHED = with_check(GOOD, "tp", "actor", "engaged", outcome="crash", summary="TypeError: no")
ROOT = Path(__file__).resolve().parents[1]


def judged(new: ResultSet, policy: Policy | None = None, old: ResultSet = GOOD) -> Judgement:
    return judge(compare(old, new, MATRIX.rows), new, MATRIX.rows, policy or Policy(), TODAY)


def waived(new: ResultSet, **waiver: Any) -> Judgement:
    fields = {"row": "tp", "until": TODAY, "reason": "known", **waiver}
    return judged(new, Policy(waiver=(Waiver(**fields),)))


def kinds(judgement: Judgement) -> list[str]:
    return [f.kind for f in judgement.red]


def test_green_without_a_change_and_with_a_change_for_the_better() -> None:
    assert kinds(judged(GOOD)) == []
    assert lines(judged(GOOD)) == ["gate: green"]
    assert kinds(judged(GOOD, old=CRASHED)) == []


def test_red_on_a_regression() -> None:
    found = judged(CRASHED)
    assert kinds(found) == ["regressed"]
    assert lines(found) == [
        "RED regressed: tp actor engaged: pass, now crash: TypeError: no",
        "gate: red: 1 regressed",
    ]
    assert kinds(judged(CRASHED, old=CRASHED)) == [], "red before and after is no regression"
    not_run = with_check(GOOD, "tp", "actor", "engaged", outcome="not_run")
    assert kinds(judged(not_run)) == ["lost"]


def test_red_when_a_check_is_gone() -> None:
    rest = tuple(r for r in GOOD.checks if r.row != "tp")
    assert set(kinds(judged(replace(GOOD, checks=rest)))) == {"gone"}
    assert len(judged(replace(GOOD, checks=())).red) == len(GOOD.checks), "an empty set is not green"
    new_and_broken = with_check(GOOD, "tp", "actor", "engaged", outcome="crash")
    assert kinds(judged(new_and_broken, old=replace(GOOD, checks=rest))) == [], "what is new did not regress"


def outcome_of_gate(old: Outcome | None, new: Outcome | None) -> tuple[list[str], bool]:
    """The kinds of red for one check that goes from `old` to `new` (None: there is no such check), and whether it is noted."""

    def side(outcome: Outcome | None) -> ResultSet:
        name = ("tp", "ref", "documented", "engaged", None)
        if outcome is None:
            return replace(GOOD, checks=tuple(r for r in GOOD.checks if r.name != name))
        return with_check(GOOD, "tp", "ref", "engaged", outcome=outcome, summary="why")

    found = judged(side(new), old=side(old))
    said = f"note: no pass, and no answer before: tp ref engaged: {old or 'not there'}, now {new}: why"
    assert (said in lines(found)) == bool(found.noted)
    return kinds(found), bool(found.noted)


def test_the_rule_over_all_pairs_of_outcomes() -> None:
    """Written out as the table of docs/gate-in-ci.md."""
    ladder: tuple[Outcome, ...] = ("pass", "always_on", "no_effect", "refused", "crash", "fail")
    silent: tuple[Outcome | None, ...] = ("not_run", "unsupported", "error", None)
    for i, old in enumerate(ladder):
        for j, new in enumerate(ladder):
            assert outcome_of_gate(old, new) == (["regressed"] if j > i else [], False), (old, new)
        assert outcome_of_gate(old, "not_run") == outcome_of_gate(old, "unsupported") == (["lost"], False), old
    for old_silent in silent:
        assert outcome_of_gate(old_silent, "pass") == ([], False)
        for new in ladder[1:]:
            assert outcome_of_gate(old_silent, new) == ([], True), (old_silent, new)
        for new_silent in ("not_run", "unsupported"):
            assert outcome_of_gate(old_silent, new_silent) == ([], False), (old_silent, new_silent)  # type: ignore[arg-type]
    for any_old in (*ladder, *silent):
        assert outcome_of_gate(any_old, "error") == (["error of this suite"], False)
        assert any_old is None or outcome_of_gate(any_old, None) == (["gone"], False)


def test_a_lost_answer_of_an_operator_is_red_and_a_new_failure_of_one_is_noted() -> None:
    good, silent, bad = (with_operator(GOOD, outcome, "why") for outcome in ("pass", "not_run", "fail"))
    assert kinds(judged(silent, old=good)) == ["lost"]
    for old in (silent, GOOD):
        found = judged(bad, old=old)
        assert kinds(found) == []
        assert any("note: no pass, and no answer before: operator rms_norm: " in line for line in lines(found))


def test_a_new_failure_is_red_where_the_row_must_work() -> None:
    policy = Policy.model_validate({"must_work": ({"rows": ("tp",)},)})
    silent = with_check(GOOD, "tp", "ref", "engaged", outcome="not_run")
    broken = with_check(GOOD, "tp", "ref", "engaged", outcome="crash")
    assert kinds(judged(broken, policy, old=silent)) == ["must work"]


def test_red_when_a_parity_check_has_lost_its_figures() -> None:
    def measuring(detail: dict[str, Any], outcome: Outcome = "pass") -> ResultSet:
        return with_check(GOOD, "tp", "actor", "parity", "float32", detail=detail, outcome=outcome)

    old = measuring(measured(1.0))
    assert kinds(judged(old, old=old)) == []
    for detail in ({}, {"measured": {}}, measured(1.0, quantity="entropy"), {"measured": {"log_probs": 3}}):
        found = judged(measuring(detail), old=old)
        assert kinds(found) == ["figures gone"], detail
        assert lines(found)[0] == (
            "RED figures gone: tp actor parity float32: passes, and has none of its figures any more: log_probs"
        )
        covering = Policy(waiver=(Waiver(row="tp", until=TODAY, reason="r", check="parity", precision="float32"),))
        assert kinds(judged(measuring(detail), covering, old=old)) == []
    assert kinds(judged(old, old=measuring({}))) == [], "figures that came"
    assert kinds(judged(measuring({}, "fail"), old=old)) == ["regressed"], "told once"
    more = {"measured": {**measured(1.0)["measured"], **measured(1.0, quantity="loss")["measured"]}}
    assert kinds(judged(old, old=measuring(more))) == [], "some are left"


def test_red_on_an_error_of_the_suite_also_where_there_was_one_before() -> None:
    error = with_check(GOOD, "tp", "actor", "engaged", outcome="error", summary="RuntimeError: ours")
    assert kinds(judged(error)) == ["error of this suite"]
    assert kinds(judged(error, old=error)) == ["error of this suite"]


def test_operators_are_gated_and_waived() -> None:
    good, bad, error = (with_operator(GOOD, outcome, "why") for outcome in ("pass", "fail", "error"))
    assert kinds(judged(good, old=good)) == []
    assert lines(judged(bad, old=good))[0] == "RED regressed: operator rms_norm: pass, now fail: why"
    assert kinds(judged(GOOD, old=good)) == ["gone"]
    assert kinds(judged(bad, old=bad)) == []
    assert kinds(judged(error, old=error)) == ["error of this suite"]
    for fields, red in [
        ({"operator": "rms_norm"}, []),
        ({"operator": "swiglu"}, ["regressed"]),
        ({"row": "rms-norm"}, ["regressed"]),
    ]:
        policy = Policy(waiver=(Waiver.model_validate({"until": TODAY, "reason": "r", **fields}),))
        assert kinds(judged(bad, policy, old=good)) == red
    past = Policy(waiver=(Waiver(operator="rms_norm", until=datetime.date(2020, 1, 1), reason="r"),))
    assert kinds(judged(bad, past, old=good)) == ["regressed", "waiver past its date"]


def test_rows_that_must_work() -> None:
    policy = Policy.model_validate({"must_work": ({"rows": ("tp",)},)})
    assert kinds(judged(GOOD, policy)) == []
    assert kinds(judged(CRASHED, policy, old=CRASHED)) == ["must work"]
    assert kinds(judged(CRASHED, policy)) == ["regressed", "must work"]
    ref_only = Policy.model_validate({"must_work": ({"rows": ("tp",), "roles": ("ref",)},)})
    assert kinds(judged(CRASHED, ref_only, old=CRASHED)) == []
    always = with_check(GOOD, "tp", "actor", "engaged", outcome="always_on")
    assert kinds(judged(always, policy, old=always)) == ["must work"]
    enough = Policy.model_validate({"must_work": ({"rows": ("tp",), "verdicts": ("works", "always on")},)})
    assert kinds(judged(always, enough, old=always)) == []
    absent = Policy.model_validate({"must_work": ({"rows": ("mc2",)},)})
    assert kinds(judged(GOOD, absent)) == ["must work", "must work"], "a row without a record does not work"


def test_a_waiver_holds_until_the_end_of_its_day() -> None:
    for days, red in [(1, []), (0, []), (-1, ["regressed", "waiver past its date"])]:
        found = waived(CRASHED, until=TODAY + datetime.timedelta(days=days))
        assert kinds(found) == red, days
    assert kinds(waived(GOOD, until=TODAY - datetime.timedelta(days=1))) == ["waiver past its date"], "also if it is not needed"
    assert lines(waived(CRASHED))[0].startswith("waived until 2026-09-01 (known): regressed: tp actor engaged")


@pytest.mark.parametrize(
    ("narrowed", "covers"),
    [
        ({}, True),
        ({"roles": ("actor",)}, True),
        ({"roles": ("ref",)}, False),
        ({"check": "engaged"}, True),
        ({"check": "parity"}, False),
        ({"variant": "documented"}, True),
        ({"variant": "effective"}, False),
        ({"outcome": "crash"}, True),
        ({"outcome": "refused"}, False),
        ({"precision": "float32"}, False),
        ({"row": "swap-optimizer"}, False),
    ],
)
def test_a_waiver_covers_what_it_names_and_no_more(narrowed: dict[str, Any], covers: bool) -> None:
    found = waived(CRASHED, **narrowed)
    assert kinds(found) == ([] if covers else ["regressed"])
    assert len(found.unused) == (not covers)
    assert any("waives nothing" in line for line in lines(found)) == (not covers)


def test_only_a_waiver_of_the_row_covers_that_it_must_work() -> None:
    must = Policy.model_validate({"must_work": ({"rows": ("tp",)},)})
    for fields, red in [({}, []), ({"check": "engaged"}, ["must work"])]:
        policy = must.model_copy(update={"waiver": (Waiver(row="tp", until=TODAY, reason="r", **fields),)})  # type: ignore[arg-type]
        assert kinds(judged(CRASHED, policy)) == red


def test_other_devices_and_backends_are_not_gated() -> None:
    for header in ({"device": "npu"}, {"backend": "plain"}):
        with pytest.raises(UsageFault, match="right form: two sets of one backend and device"):
            judged(result_set(**header))


POLICY = """\
[[must_work]]
rows = ["tp"]

[[waiver]]
row = "swap-optimizer"
variant = "effective"
until = 2026-12-31
reason = "because"
"""


def load(tmp_path: Path, text: str | bytes) -> Policy:
    path = tmp_path / "gate.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_policy(path, MATRIX)


def test_a_policy_is_read(tmp_path: Path) -> None:
    policy = load(tmp_path, POLICY)
    assert policy.must_work[0].rows == ("tp",)
    assert policy.waiver[0].until == datetime.date(2026, 12, 31)
    assert load(tmp_path, "") == Policy()
    assert load_policy(ROOT / "docs" / "examples" / "gate.toml", MATRIX).must_work


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ('rows = ["tp"]', 'rows = ["tpp"]', ":2: row number 1: key 'rows': 'tpp' is no row; right form: did you mean 'tp'?"),
        ('rows = ["tp"]', "rows = []", ":2: row number 1: key 'rows': too few items; right form: at least 1"),
        ('rows = ["tp"]', 'rows = "tp"', ":2: row number 1: key 'rows': 'tp' is not a list; right form: a list: [\"a\", \"b\"]"),
        ('rows = ["tp"]', 'rows = ["tp"]\nroles = ["critic"]', ":3: row number 1: key 'roles[0]': 'critic' is not allowed"),
        ('rows = ["tp"]', 'rows = ["tp"]\nverdicts = ["green"]', ":3: row number 1: key 'verdicts[0]': 'green' is no verdict"),
        ("[[must_work]]", "[[mustwork]]", ":1: key 'mustwork': unknown field 'mustwork'; right form: did you mean 'must_work'?"),
        ("[[waiver]]", "[waiver]", ':4: key \'waiver\': a mapping is not a list; right form: a list: ["a", "b"], or a [[name]]'),
        (
            "2026-12-31",
            '"2026-12-31"',
            ":7: row 'swap-optimizer': key 'until': '2026-12-31' is not a date; right form: a date wit",
        ),
        ("2026-12-31", "2026-12-31T01:00:00Z", ":7: row 'swap-optimizer': key 'until': "),
        ('row = "swap-optimizer"\nvariant = "effective"', 'operator = "norm"', ":5: row number 1: key 'operator': 'norm' is not"),
        (
            'row = "swap-optimizer"\nvariant = "effective"',
            "",
            ":4: row number 1: a waiver of neither or both; right form: one of",
        ),
        ('variant = "effective"', 'operator = "swiglu"', ":4: row 'swap-optimizer': a waiver of neither or both"),
        ("2026-12-31", "2026-02-30", ":7: Invalid date or datetime"),
        ("until = 2026-12-31\n", "", ":4: row 'swap-optimizer': key 'until': missing"),
        ('"because"', '""', ":8: row 'swap-optimizer': key 'reason': empty text"),
        ('"because"', '" \\t"', ":8: row 'swap-optimizer': key 'reason': blank text; right form: some words"),
        ('"because"', '"because', ":8: "),
        ('"because"', '"a"\nwhy = 1', ":9: row 'swap-optimizer': key 'why': unknown field 'why'"),
        ('"because"', '"a"\nreason = "b"', ":9: Cannot overwrite a value"),
        ('"effective"', '"efective"', ":6: row 'swap-optimizer': key 'variant': no such variant; right form: did you mean"),
        ('"swap-optimizer"', '"swap_optimizer"', ":5: row 'swap_optimizer': key 'row': 'swap_optimizer' is not an id"),
    ],
)
def test_a_broken_policy_is_told_in_one_line(tmp_path: Path, old: str, new: str, wanted: str) -> None:
    assert old in POLICY
    with pytest.raises(UsageFault) as caught:
        load(tmp_path, POLICY.replace(old, new, 1))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.removeprefix(str(tmp_path / "gate.toml")).startswith(wanted), message


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"\x00",
        b"a = " + b"[" * 3_900,
        b"a" + b".a" * 20_000 + b" = 1",
        b"".join(b"b%d" % i + b".a" * 1_990 + b" = 1\n" for i in range(12)),
        b"a = " + b"9" * 3_900,
        b"#\n" * 25_001,
        b"waiver = 3",
        b"waiver = [3]",
        b"waiver = [[1]]",
        b'"\\u001b[31m" = 1',
        b"[[waiver]]\n" * 4000,
    ],
)
def test_a_hostile_policy_is_told_in_one_line_and_soon(tmp_path: Path, text: bytes) -> None:
    began = datetime.datetime.now()
    with pytest.raises(UsageFault) as caught:
        load(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 1
    assert (datetime.datetime.now() - began).total_seconds() < 10


def test_a_policy_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.toml"):
        with pytest.raises(UsageFault, match="cannot be read"):
            load_policy(path, MATRIX)


@given(st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
def test_any_bytes_are_read_or_told(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    message = ""
    try:
        load(tmp_path_factory.mktemp("fuzz"), data)
    except UsageFault as fault:
        message = str(fault)
    assert len(message.splitlines()) <= 1


def test_the_published_schema_has_the_fields() -> None:
    schema = json.loads(texts()["policy.schema.json"])
    assert set(schema["properties"]) == {"must_work", "waiver"}
    assert set(schema["$defs"]["Waiver"]["required"]) == {"until", "reason"}
