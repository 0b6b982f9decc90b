"""The Markdown table: read back by a Markdown parser of other hands, it shows what went in and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from conformance.matrix import ROLES, load_matrix
from conformance.report import markdown
from conformance.report.markdown import code, escape, render, table
from conformance.report.words import OUTCOME_SIGNS, VERDICT_SIGNS, WORDS, Language
from conformance.results import CHECKS, OUTCOMES, CheckRecord, Footer, Header, Package, ResultSet, UpstreamException
from conformance.verdict import Verdict

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
MATRIX = load_matrix()
HEADER = Header(
    started="2026-09-01T00:00:00Z",
    device="emulated",
    backend="mindspeed",
    precisions=("float32", "bfloat16"),
    stack=(Package("verl", "0.9.1", "/somewhere/verl"), Package("mindspeed", "0.16.0", None, "e4772499")),
    matrix_sha256="0" * 64,
    rows=tuple(MATRIX.ids()),
    complete_selection=True,
)
HOSTILE = "a|b\\|c\n`code` <script>alert(1)</script> *x* _y_ [l](http://h) ![i](u) ~~s~~ &lt; # $m$ \x1b[31m\u202e end\\"
LANGUAGES: tuple[Language, ...] = ("en", "zh")


def records(row: str, variant: str = "documented", summary: str = "seen") -> list[CheckRecord]:
    return [
        CheckRecord(row, role, variant, check, precision, "pass", summary)
        for role in ROLES
        for check in CHECKS
        for precision in (HEADER.precisions if check == "parity" else (None,))
    ]


def results(*checks: CheckRecord, complete: bool = True, header: Header = HEADER) -> ResultSet:
    footer = Footer(checks=len(checks), wall_s=1.0, finished="x") if complete else None
    return ResultSet(header, checks, footer)


def plain(token: Token) -> str:
    """What a reader sees of an inline token; fails on anything but text and code spans."""
    assert {child.type for child in token.children or []} <= {"text", "code_inline", "text_special"}, token.content
    return "".join(child.content for child in token.children or [])


def tables(page: str) -> list[list[list[str]]]:
    """Tables of a page as lists of lines of cells, the heading first."""
    found: list[list[list[str]]] = []
    tokens = PARSER.parse(page)
    assert not [t for t in tokens if t.type == "html_block"]
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "inline" and before and before.type in ("td_open", "th_open"):
            found[-1][-1].append(plain(token))
    return found


def shown(text: str) -> str:
    """What a reader should see of a text: printable, on one line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def check_table(render_table: Callable[[list[list[str]]], str], cells: list[list[str]]) -> None:
    """Assert that a table writer's output reads back as the texts that went in."""
    (read,) = tables(render_table(cells))
    assert read[1:] == [[shown(cell) for cell in line] for line in cells]


def escaping(lines: list[list[str]]) -> str:
    return table(["a", "b"], [[escape(cell) for cell in line] for line in lines])


CELLS = [[HOSTILE, "x"], ["", HOSTILE], ["-", "1."], ["a\\", "| b"], ["1e5", "007"], ["_a_b_ __c", "\\\\|\\"]]


def test_hostile_cells_read_back() -> None:
    check_table(escaping, CELLS)


@given(
    st.lists(
        st.lists(st.text("ab |\\`*_[]()<>~&!#$-+=1.\n\t\r\x00\u2028:/é张", max_size=12), min_size=2, max_size=2),
        min_size=1,
    )
)
def test_any_cells_read_back(cells: list[list[str]]) -> None:
    check_table(escaping, cells)


@pytest.mark.parametrize(
    "planted",
    [
        lambda text: text,  # no escaping at all, which is what tabulate does
        lambda text: " ".join(text.split()),
        lambda text: escape(text).replace("\\|", "|"),
        lambda text: escape(text).replace("\\`", "`"),
        lambda text: escape(text).replace("\\<", "<").replace("\\>", ">"),
        lambda text: escape(text).replace("\\*", "*"),
        lambda text: escape(text).replace("\\&", "&"),
        lambda text: escape(text.replace("\\", "\\\\")),
    ],
)
def test_a_table_writer_that_forgets_an_escape_is_caught(planted: Callable[[str], str]) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_table(lambda lines: table(["a", "b"], [[planted(cell) for cell in line] for line in lines]), CELLS)


@given(st.text("ab|`\\ '\n<", max_size=8))
def test_a_code_span_reads_back_or_is_no_code_span(text: str) -> None:
    (read,) = tables(table(["a", "b"], [[code(text), "x"]]))
    assert [shown(cell) for cell in read[1]] == [shown(text), "x"]


def test_a_changed_cell_changes_one_line_of_text() -> None:
    before, after = (table(["a", "名"], [["x", "1"], [cell, "2"]]).split("\n") for cell in ("y", "y" * 99 + "张"))
    assert before[:3] == after[:3] == ["| a | 名 |", "|---|---|", "| x | 1 |"]
    assert table(["a"], []).split("\n") == ["| a |", "|---|"]


def test_long_text_is_cut_and_says_so() -> None:
    assert escape("x" * 20, limit=10) == "x" * 10 + "…"
    assert escape("x" * 10, limit=10) == "x" * 10


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_tables_have_all_rows_in_order_and_the_upstream_columns(language: Language) -> None:
    features, fused, _stack = tables(render(results(), MATRIX.rows, language))
    names = [line[0] for line in features[1:] + fused[1:] if not line[0].startswith("↳")]
    assert names == [row.name for row in MATRIX.rows]
    if language == "zh":
        assert features[0][:3] == ["特性名称", "配置参数", "状态"]
    for line in features[1:] + fused[1:]:
        assert line[2] == "Preview"
        assert "emulated" in line[8], "an emulated run is labelled in every line"
        assert line[3].count(WORDS[language].verdicts[Verdict.NOT_RUN][0]) == 2, "no records, nothing green"
        assert line[9] == "verl 0.9.1, mindspeed 0.16.0"
    keys = {line[0]: line[1] for line in features[1:] + fused[1:]}
    assert keys["mc2"] == "actor_rollout_ref.actor.megatron.override_transformer_config.use_ascend_mc2=true"
    assert WORDS[language].companions + " " in keys["↳ mc2 (effective)"]
    assert "sequence_parallel=true" in keys["↳ mc2 (effective)"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_cell_shows_its_own_role_and_precision(language: Language) -> None:
    checks = records("tp")
    checks = [replace(c, outcome="fail") if (c.role, c.precision) == ("ref", "bfloat16") else c for c in checks]
    line = tables(render(results(*checks), MATRIX.rows, language))[0][1]
    words = WORDS[language]
    good, bad = f"✅ {words.outcomes['pass']}", f"❌ {words.outcomes['fail']}"
    assert line[3] == f"actor ✅ {words.verdicts[Verdict.WORKS][0]}, ref ❌ {words.verdicts[Verdict.WRONG_NUMBERS][0]}"
    assert line[4:6] == [f"actor {good}, ref {good}"] * 2
    assert line[6] == f"actor {good} (float32) {good} (bfloat16), ref {good} (float32) {bad} (bfloat16)"
    assert line[7] == "actor seen, ref seen"


def test_the_documented_line_has_the_rows_verdict_and_the_variant_its_own() -> None:
    checks = [replace(c, outcome="no_effect") if c.check == "engaged" else c for c in records("permute")]
    page = tables(render(results(*checks, *records("permute", "effective")), MATRIX.rows, "en"))[1]
    documented, variant = (line for line in page if "permute" in line[0])
    assert documented[3].startswith("actor ✅ works with another spelling (effective), ref")
    assert documented[5] == "actor ⚪ no effect, ref ⚪ no effect"
    assert variant[3] == "actor ✅ works, ref ✅ works"


def test_hostile_results_stay_in_their_place() -> None:
    raised = UpstreamException(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    detail: dict[str, Any] = {
        "forms": [{"form": "+", "outcome": "pass", "overrides": [HOSTILE]}, {"form": HOSTILE, "outcome": HOSTILE}, 3],
        "evidence": [HOSTILE, 5],
        "figures": {HOSTILE: HOSTILE, "log_prob": 4.8e-07},
        "how_to_run": HOSTILE,
    }
    header = replace(HEADER, started=HOSTILE, stack=(Package("verl", HOSTILE, None, HOSTILE),))
    checks = [replace(c, summary=HOSTILE, exception=raised, detail=detail) for c in records("tp")]
    tame = render(results(*records("tp")), MATRIX.rows, "en")
    page = render(results(*checks, header=header), MATRIX.rows, "en")
    assert [len(line) for t in tables(page) for line in t][:-1] == [len(line) for t in tables(tame) for line in t][:-2]
    allowed = {"text", "text_special", "code_inline", "strong_open", "strong_close"}
    for token in PARSER.parse(page):
        assert {child.type for child in token.children or []} <= allowed, token.content
    assert page.count("\n## ") == tame.count("\n## ")
    assert "\x1b" not in page


@pytest.mark.parametrize("weird", [{"forms": 3}, {"forms": {}}, {"evidence": "x"}, {"figures": []}, {"how_to_run": None}])
def test_detail_of_another_shape_is_left_out(weird: dict[str, object]) -> None:
    tame, odd = records("tp")[0], replace(records("tp")[0], detail=weird)  # type: ignore[arg-type]
    assert render(results(odd), MATRIX.rows, "en") == render(results(tame), MATRIX.rows, "en")


def test_the_details_give_what_one_needs_to_act() -> None:
    accepted = replace(
        records("sp")[0],
        detail={
            "forms": [
                {"form": "plain", "outcome": "refused", "summary": "Could not override"},
                {"form": "+", "outcome": "pass", "overrides": ["+a.b=true", "c=2"]},
            ]
        },
    )
    engaged = replace(records("sp")[1], outcome="not_run", summary="no MindSpeed", detail={"how_to_run": "pytest --row sp"})
    raised = UpstreamException("TypeError", "unexpected keyword", "a.py:7 __init__", "MindSpeed")
    parity = replace(records("sp")[2], outcome="crash", exception=raised, detail={"figures": {"log_prob": 4.8e-07}})
    page = render(results(accepted, engaged, parity), MATRIX.rows, "en")
    for wanted in [
        "    - plain: ⛔ refused: Could not override",
        "    - works as (+): `+a.b=true` `c=2`",
        "    - how to run: `pytest --row sp`",
        "  - engaged ⏸ not run: no MindSpeed",
        r"    - raised: TypeError: unexpected keyword (a.py:7 \_\_init\_\_, MindSpeed)",
        "    - figures: log_prob = 4.8e-07",
    ]:
        assert wanted in page.splitlines(), wanted
    assert "/somewhere" not in page, "a page is read on other machines"


@pytest.mark.parametrize("language", LANGUAGES)
def test_incomplete_and_partial_sets_say_so(language: Language) -> None:
    whole = render(results(), MATRIX.rows, language)
    assert "INCOMPLETE" not in whole
    assert "PARTIAL" not in whole
    assert "INCOMPLETE" in render(results(complete=False), MATRIX.rows, language).splitlines()[2]
    header = replace(HEADER, rows=("tp", "mc2"), complete_selection=False)
    page = render(results(header=header), MATRIX.rows, language)
    assert "PARTIAL" in page
    assert [line[0] for t in tables(page)[:2] for line in t[1:]] == ["TP", "mc2", "↳ mc2 (effective)"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_sign_has_its_word(language: Language) -> None:
    words = WORDS[language]
    assert set(OUTCOME_SIGNS) == set(words.outcomes) == set(OUTCOMES)
    assert set(VERDICT_SIGNS) == set(words.verdicts) == set(Verdict)
    assert len(set(words.outcomes.values())) == len(OUTCOMES)
    assert len({word for word, _ in words.verdicts.values()}) == len(Verdict)
    page = render(results(), MATRIX.rows, language)
    assert all(f"- {VERDICT_SIGNS[v]} {word}" in page for v, (word, _) in words.verdicts.items())


def test_the_run_is_named_with_its_stack_and_its_route() -> None:
    worker = results(header=replace(HEADER, route="worker"))
    wanted: dict[Language, str] = {
        "en": "Run started 2026-09-01T00:00:00Z; stack: verl 0.9.1, MindSpeed 0.16.0; route: worker; device: emulated NPU;",
        "zh": "运行开始于 2026-09-01T00:00:00Z；软件栈：verl 0.9.1, MindSpeed 0.16.0；途径：worker；设备：",
    }
    for language, words in wanted.items():
        assert words in render(worker, MATRIX.rows, language)
    plain_run = results(
        header=replace(HEADER, backend="plain", stack=(Package("verl", "0.9.1"), Package("megatron_core", "0.16.1")))
    )
    assert "stack: verl 0.9.1, plain megatron-core 0.16.1; route: engine;" in render(plain_run, MATRIX.rows, "en")


def test_green_signs_are_for_green_verdicts_only() -> None:
    assert [v for v in Verdict if (VERDICT_SIGNS[v] == OUTCOME_SIGNS["pass"]) != v.green] == []


def test_the_same_results_give_the_same_page_in_any_order_of_records() -> None:
    checks = [*records("tp"), *records("ep")]
    assert render(results(*checks), MATRIX.rows, "zh") == render(results(*reversed(checks)), MATRIX.rows, "zh")
    assert markdown.render is render
