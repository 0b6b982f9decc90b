"""The suite's own sentences in Chinese: every one of the published results has a translation, and upstream's text has none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from markupsafe import escape
from pages import MATRIX, written

from conformance.matrix import Evidence
from conformance.report.markdown import render
from conformance.report.page import render_page
from conformance.report.sentences import said
from conformance.report.view import detail_of
from conformance.results import FILE_NAME, CheckRecord, ResultSet, read_results

REPORTS = Path(__file__).resolve().parents[1] / "reports"


@cache
def published() -> tuple[ResultSet, ...]:
    return tuple(read_results(path) for path in sorted(REPORTS.glob(f"*/{FILE_NAME}")))


def is_chinese(text: str) -> bool:
    return any("\u4e00" <= c <= "\u9fff" for c in text)


def own_sentences(record: CheckRecord) -> Iterator[str]:
    """What this suite says in a record. A refusal's and a crash's summary is upstream's exception."""
    detail = detail_of(record)
    if record.outcome not in ("refused", "crash", "error") or record.exception is None:
        yield record.summary
    yield from (form.summary for form in detail.forms if form.outcome in ("pass", "no_effect"))
    yield from (form.name for form in detail.forms if form.name.isalpha())
    yield from detail.evidence
    yield from (text for name, text in detail.figures)
    yield from (name for name, _text in detail.figures if " " in name)
    if detail.with_plain:
        yield detail.with_plain


def test_every_sentence_of_the_published_results_has_a_translation() -> None:
    sentences = {text for results in published() for record in results.checks for text in own_sentences(record)}
    sentences |= {operator.summary for results in published() for operator in results.operators}
    assert len(sentences) > 200
    assert sorted(text for text in sentences if not is_chinese(said(text, "zh"))) == []
    assert [text for text in sentences if said(text, "en") != text] == []


def test_text_of_upstream_stays_as_it_is() -> None:
    raised = [r.exception for results in published() for r in results.checks if r.exception]
    assert raised
    for exception in raised:
        for text in (exception.message, f"{exception.type}: {exception.message}", exception.frame):
            assert said(text, "zh") == text
    overrides = {o for results in published() for r in results.checks for form in detail_of(r).forms for o in form.overrides}
    assert {text for text in overrides if said(text, "zh") != text} == set()


def test_what_a_sentence_quotes_of_upstream_stays() -> None:
    for results in published():
        for record in results.checks:
            if record.exception and record.exception.message in record.summary:
                assert record.exception.message in said(record.summary, "zh")


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("on as promised, off without it", "开启时如承诺所述，关闭时没有"),
        ("written plain or ++; trap: ++ drops inherited a, b", "可用写法：直接写、++；陷阱：++ 会丢掉继承来的 a, b"),
        (
            "yes [on] ops.x: rank 0: 4, rank 1: absent; wanted > 0 on any rank",
            "成立 [开] ops.x：rank 0: 4, rank 1: 无；要求任一 rank > 0",
        ),
        (
            "NO [change] ops.x: rank 0: 4 (off: 4); wanted != the value when off on every rank",
            "不成立 [变化] ops.x：rank 0: 4（关时：4）；要求每个 rank != 关时的值",
        ),
        ("log_probs within 1e-06, bound 1e-05", "log_probs 相差至多 1e-06，界限 1e-05"),
        (
            "loss (error against float64) differs by 0.1 (bound 0.01), global on rank 1",
            "loss（相对 float64 的误差）相差 0.1（界限 0.01），位于全局，rank 1",
        ),
        ("weights differs by inf (bound 0), only on one side: a.b", "weights 相差 inf（界限 0）；只有一侧有：a.b"),
        (
            "weights differs by inf (bound 0), a.b: shape (1,), wanted (2, 3)",
            "weights 相差 inf（界限 0）；a.b 的形状为 (1,)，应为 (2, 3)",
        ),
        ("nothing reads a_key in this step; like it, and read: b_key", "这一步中没有代码读取 a_key；相近且被读取的有：b_key"),
        ("composes, but a.b does not reach ref's engine", "配置可以组合，但 a.b 未到达 ref 的引擎"),
        ("deadline of 60 s passed; ranks 0, 1 stuck", "超过 60 秒的时限；ranks 0, 1 未结束"),
        ("rank 1 was killed by SIGKILL", "rank 1 被 SIGKILL 终止"),
        ("crash: cannot be switched off: TypeError: no {0}", "崩溃：无法关闭：TypeError: no {0}"),
        ("torch 2.8.0 (the stack pins ==2.13.0)", "torch 2.8.0（软件栈固定为 ==2.13.0）"),
    ],
)
def test_sentences(english: str, chinese: str) -> None:
    assert said(english, "zh") == chinese
    assert said(english, "en") == english


def test_the_evidence_of_every_row_can_be_said() -> None:
    seen: list[list[float | str | None]] = [[1.0, 0.5], ["a.B", None], [None]]
    for row in MATRIX.rows:
        evidence: list[Evidence] = [e for v in row.variant_names for role in ("actor", "ref") for e in row.evidence_for(v, role)]
        for item in evidence:
            for values in seen:
                for judged in (item.judge_on(values), item.judge_off(values)):
                    if judged:
                        text = said(f"NO [on] {judged.text}", "zh")
                        assert is_chinese(text)
                        assert "wanted" not in text
                        assert "absent" not in text


def test_the_chinese_pages_have_no_sentence_of_ours_in_english() -> None:
    english = (
        "on as promised",
        "on every rank",
        "; wanted",
        " within ",
        "(bound ",
        "written +",
        "drops inherited",
        "; trap:",
        "nothing reads",
    )
    for results in published():
        page = render(results, MATRIX.rows, "zh")
        assert {words: page.count(words) for words in english if words in page} == {}
        assert any(words in render(results, MATRIX.rows, "en") for words in english)
        html = render_page(results, [results], MATRIX.rows)
        own = {escape(text) for record in results.checks for text in own_sentences(record)}
        assert sum(html.count(f"<bdi>{text}</bdi>") for text in own) > 100
        assert {
            text for text in own if html.count(f"<bdi>{text}</bdi>") != html.count(f'<span lang="en"><bdi>{text}</bdi>')
        } == set()


def test_the_page_says_a_sentence_once_in_each_language() -> None:
    page = render_page(written("taken"), [written("taken")], MATRIX.rows)
    assert '<span lang="en"><bdi>taken</bdi></span><span lang="zh"><bdi>接受</bdi></span>' in page
    assert "<b><bdi>taken</bdi></b>: <bdi>taken</bdi>" in page, "what upstream raised, whatever it is"


@pytest.mark.parametrize(
    "text",
    [
        "written " + "plain or " * 400,
        "yes [on] x: " + "; wanted " * 400,
        "1 (bound 1) at a: shape (" + "), wanted (" * 300,
        "trap " + "on rank 1: " * 300,
        "the key changes something else than promised: " + " on rank 1: a (off: " * 190,
        "cannot be switched off: " * 160,
        "x" * 3999 + " within",
        "nothing reads " + " in this step" * 300 + "\n",
    ],
)
def test_a_strangers_text_takes_no_time(text: str) -> None:
    began = time.perf_counter()
    said(text, "zh")
    said(text * 1000, "zh")
    assert time.perf_counter() - began < 0.5
