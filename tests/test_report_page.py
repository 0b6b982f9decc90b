"""The HTML page: what is in it, that no text of a result becomes markup, and that the same input gives the same bytes."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import Environment
from pages import HOSTILE, MATRIX, records, results, written

from conformance.errors import UsageFault
from conformance.matrix import ROLES
from conformance.report import page
from conformance.report.history import MAX_RUNS, History, Span, read_runs, spans, worst_share
from conformance.report.page import ITEMS, TEXT, render_page, shell
from conformance.report.words import WORDS
from conformance.results import CHECKS, FILE_NAME, ResultSet, encode

ROOT = Path(__file__).resolve().parents[1]
Element = tuple[str, tuple[tuple[str, str | None], ...]]


class Parsed(HTMLParser):
    """The elements of a page in their order, and the text of the elements that are asked for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def text(self, *tags: str) -> str:
        return "".join(data for tag, data in self.texts if tag in tags)

    def values(self, attribute: str) -> list[str]:
        return [value or "" for _tag, attrs in self.elements for name, value in attrs if name == attribute]


def render(*runs: ResultSet) -> str:
    return render_page(runs[-1], runs, MATRIX.rows)


def skeleton(text: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(tag, tuple(name for name, _value in attrs)) for tag, attrs in Parsed(text).elements]


def check_nothing_became_markup(render: Callable[[ResultSet], str]) -> None:
    """The page of hostile texts has the very elements of the page of tame ones."""
    tame, hostile = render(written("seen")), render(written(HOSTILE))
    assert skeleton(hostile) == skeleton(tame)
    assert not [c for c in hostile if not c.isprintable() and c != "\n"], "control or bidirectional characters"


def test_no_text_of_a_result_becomes_markup() -> None:
    check_nothing_became_markup(render)
    check_nothing_became_markup(lambda run: render(written("seen", "2026-08-01T00:00:00Z"), run))


@pytest.mark.parametrize("planted", ["autoescape", "finalize"])
def test_a_page_that_forgets_to_escape_is_caught(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(make: Callable[[], Environment] = page._environment) -> Environment:
        environment = make()
        setattr(environment, planted, {"autoescape": False, "finalize": None}[planted])
        return environment

    monkeypatch.setattr(page, "_environment", careless)
    with pytest.raises(AssertionError):
        check_nothing_became_markup(render)


def test_the_page_needs_no_network_and_runs_only_its_own_script() -> None:
    text = render(written(HOSTILE))
    parsed = Parsed(text)
    assert {value for name in ("href", "xlink:href") for value in parsed.values(name) if not value.startswith("#")} == set()
    assert not any(parsed.values(name) for name in ("src", "srcset", "action", "style", "data", "poster"))
    assert not [name for _tag, attrs in parsed.elements for name, _value in attrs if name.startswith("on")]
    assert Counter(tag for tag, _ in parsed.elements)["script"] == 1
    policy = next(v for v in parsed.values("content") if v.startswith("default-src"))
    assert "unsafe" not in policy
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        inside = text.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        assert not re.search(r"url\(|@import|https?:|fetch\(|eval\(|innerHTML", inside)
        assert f"{directive} 'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'" in policy


def test_every_check_of_every_line_has_a_cell_that_opens() -> None:
    parsed = Parsed(render(written("seen")))
    ids = [v for tag, attrs in parsed.elements if tag == "details" for name, v in attrs if name == "id"]
    wanted = [f"{row.id}-{v}-{role}-{c}" for row in MATRIX.rows for v in row.variant_names for role in ROLES for c in CHECKS]
    assert sorted(ids) == sorted(wanted)
    everything = parsed.values("id")
    assert len(everything) == len(set(everything))
    assert [tag for tag, _ in parsed.elements].count("summary") == [tag for tag, _ in parsed.elements].count("details")


def test_headers_say_what_they_head() -> None:
    parsed = Parsed(render(written("seen")))
    assert all("scope" in dict(attrs) for tag, attrs in parsed.elements if tag == "th")
    assert dict(next(attrs for tag, attrs in parsed.elements if tag == "html"))["lang"] == "en"


def test_each_text_is_in_both_languages_and_no_sign_stands_alone() -> None:
    text = render(written("seen"), written("seen", "2026-10-01T00:00:00Z"))
    languages = Counter(Parsed(text).values("lang"))
    assert languages["en"] == languages["zh"] + 1, "one more: the page's own"
    badges = re.findall(r'<span class="badge \w+"><span aria-hidden="true">(.*?)</span> <span lang="en">(.*?)</span>', text)
    assert len(badges) == text.count('class="badge ')
    assert all(sign and word for sign, word in badges)


def test_missing_records_are_not_green() -> None:
    parsed = Parsed(render(results()))
    tones = Counter(value for value in parsed.values("class") if value.startswith("badge"))
    legend = 3
    assert tones["badge good"] == legend
    assert WORDS["en"].page.no_record in parsed.text("span")


def test_incomplete_partial_and_unknown_rows_are_said() -> None:
    whole = render(results())
    assert "INCOMPLETE" not in whole
    assert "INCOMPLETE" in render(results(complete=False))
    part = render(results(rows=("tp", "dropped"), complete_selection=False))
    assert "PARTIAL" in part
    assert f'{WORDS["en"].page.gone}</span><span lang="zh">{WORDS["zh"].page.gone}</span> dropped' in part
    assert part.count('class="line') == 1


def test_the_same_input_gives_the_same_bytes() -> None:
    checks = records("tp") + records("mc2", variant="effective")
    old = results(started="2026-01-01T00:00:00Z")
    assert render(old, results(*checks)) == render(old, old, results(*reversed(checks)))


def test_what_is_too_long_is_cut_and_says_so() -> None:
    huge = records("tp", "seen", summary="x" * 10 * TEXT, detail={"evidence": [f"line {i}" for i in range(10 * ITEMS)]})
    text = render(results(*huge))
    assert "x" * TEXT + "…" in text
    assert "x" * (TEXT + 1) not in text
    assert f"line {ITEMS - 1}<" in text
    assert f"line {ITEMS}<" not in text
    assert f'<p class="hint">{9 * ITEMS} <span' in text


@pytest.mark.parametrize("text", ["a.b=1", "++a.b='4,5'", "'; touch x #", "$(touch x)", "a\nb", "a\u202eb", "'" * 3000])
def test_an_override_is_one_word_of_a_shell(text: str) -> None:
    (word,) = shlex.split(shell(text).unescape())
    assert word == text or not text.isprintable() or len(text) > TEXT


def test_overrides_are_ready_to_copy() -> None:
    parsed = Parsed(render(results(*records("noop-layers"))))
    assert "'++actor_rollout_ref.actor.megatron.override_transformer_config.noop_layers='\"'\"'4,5'\"'\"''" in parsed.text("code")
    assert all(("type", "button") in attrs for tag, attrs in parsed.elements if tag == "button")


def test_history_is_in_the_order_of_the_runs_start() -> None:
    new = results(*records("tp"), started="2026-03-01T00:00:00Z")
    old = results(*records("tp", outcome="crash"), started="2026-01-01T00:00:00Z")
    middle = results(*records("tp", outcome="crash"), started="2026-02-01T00:00:00Z")
    history = History([new, old, middle, old])
    assert [run.header.started[:7] for run in history.runs] == ["2026-01", "2026-02", "2026-03"]
    marks = history.of(new.checks[0])
    assert list(spans(marks)) == [Span(1, 2, "crash"), Span(3, 3, "pass")]
    parsed = Parsed(render(old, middle, new))
    assert Counter(parsed.values("href"))["#mark-crash"] == 2 * len(new.checks)
    assert Counter(parsed.values("href"))["#mark-pass"] == len(new.checks)
    assert "<svg" not in render(new).split("<main")[1], "one run has no history"


def test_every_outcome_has_a_mark_of_its_own_shape() -> None:
    symbols = dict(re.findall(r'<symbol id="mark-(\w+)"[^>]*>(.*?)</symbol>', render(results())))
    assert set(symbols) == set(WORDS["en"].outcomes)
    assert len(set(symbols.values())) == len(symbols)


@pytest.mark.parametrize(
    ("figures", "share"),
    [
        ({"a": "1e-7 (bound 1e-6) at x", "b": "5e-7 (bound 1e-6) at x"}, 0.5),
        ({"a": "0 (bound 0) at x"}, 0.0),
        ({"a": "1e-9 (bound 0) at x"}, float("inf")),
        ({"a": "nan (bound 1) at x", "b": "0 (bound 1)"}, float("inf")),
        ({"a": "x (bound y)", "b": 3.0}, None),
        ({}, None),
    ],
)
def test_the_worst_share_of_a_bound(figures: dict[str, object], share: float | None) -> None:
    (record, *_rest) = records("tp", detail={"figures": figures})
    found = worst_share(record)
    assert found == pytest.approx(share) if share is not None else found is None
    mark = History([results(record)]).of(record)[0]
    assert mark.level is None if share is None else 0.0 <= (mark.level or 0.0) <= 1.0


def _luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(scheme: int) -> None:
    blocks = re.findall(r":root \{([^}]*)\}", (ROOT / "conformance/report/page.css").read_text(encoding="utf-8"))
    colours = dict(re.findall(r"--(\w+(?:-bg)?): (#\w+)", blocks[scheme]))
    pairs = [(tone, f"{tone}-bg") for tone in ("good", "bad", "odd", "quiet")]
    pairs += [(ink, paper) for ink in ("fg", "soft", "accent") for paper in ("bg", "head", "panel")]
    assert [p for p in pairs if contrast(colours[p[0]], colours[p[1]]) < 4.5] == []


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#fff", "#000000") == pytest.approx(21)
    assert contrast("#777", "#fff") < 4.5 < contrast("#767676", "#fff")


def save(run: ResultSet, directory: Path) -> Path:
    directory.mkdir(parents=True)
    assert run.footer is not None
    (directory / FILE_NAME).write_bytes(b"".join(encode(line) for line in (run.header, *run.checks, run.footer)))
    return directory


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "conformance", "page", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_command_shows_the_last_and_counts_all(tmp_path: Path) -> None:
    old = save(results(*records("tp", outcome="crash"), started="2026-01-01T00:00:00Z"), tmp_path / "runs/1")
    new = save(results(*records("tp"), started="2026-02-01T00:00:00Z"), tmp_path / "new")
    out = tmp_path / "page.html"
    done = command(old, new, "--history", tmp_path / "runs", "--out", out)
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8")
    assert re.search(r'<tr><th scope="row">2</th><td><bdi>2026-02-01T00:00:00Z</bdi> <b>', text)
    assert '<th scope="row">3</th>' not in text, "a run that was given twice counts once"


def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    good = save(results(*records("tp")), tmp_path / "good")
    bad = save(results(*records("tp")), tmp_path / "bad")
    (bad / FILE_NAME).write_text('{"kind": "header"}\n', encoding="utf-8")
    out = tmp_path / "page.html"
    for arguments, words in [
        ((bad, "--out", out), "results.jsonl:1:"),
        ((good, "--history", tmp_path / "none", "--out", out), "no results in it"),
        ((good, "--out", tmp_path / "none/page.html"), "page.html"),
    ]:
        done = command(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert words in done.stderr
        assert not out.exists()


def test_too_many_runs_are_refused_before_any_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match=f"at most {MAX_RUNS}"):
        read_runs([tmp_path / "none"] * (MAX_RUNS + 1), None)


def test_the_page_and_its_history_name_stack_and_route() -> None:
    old, new = written("seen", "2026-08-01T00:00:00Z"), results(route="worker")
    old = replace(old, header=replace(old.header, route="engine"))
    text = render(old, new)
    assert "stack: verl 0.9.1, MindSpeed 0.16.0; route: worker; device: emulated NPU" in text
    assert "软件栈：verl 0.9.1, MindSpeed 0.16.0；途径：worker；设备：" in text
    runs = text[text.index('<h2 id="runs">') :]
    for word in ("Route", "途径"):
        assert f">{word}</span>" in runs
    assert [runs.count(f"<td>mindspeed</td><td>{route}</td>") for route in ("engine", "worker")] == [1, 1]
