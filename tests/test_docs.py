"""The documentation: generated pages are as generated, hostile results stay text, and Sphinx builds it without a warning."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt
from pages import HOSTILE, MATRIX, written

from conformance import docs, parity, verdict
from conformance.__main__ import main
from conformance.explain import role_overrides
from conformance.known import KnownIssue, load_known
from conformance.matrix import ROLES, Row
from conformance.report.row_page import WRITTEN, index_page, row_page
from conformance.report.verdict_page import prose, verdict_page
from conformance.report.view import View
from conformance.results import Package

ROOT = Path(__file__).resolve().parents[1]
PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
needs_sphinx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
    reason="no sphinx here: python -m tox -e docs builds the documentation",
)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return docs.pages()


def test_the_committed_pages_are_as_generated(pages: dict[str, str]) -> None:
    new_results = subprocess.run(["git", "status", "--porcelain", "reports"], cwd=ROOT, capture_output=True, text=True).stdout
    if new_results:
        pytest.skip("reports/ has results that are not committed: python -m conformance docs, and commit both")
    assert docs.differing(docs.DOCS, pages) == [], "right form: python -m conformance docs"


def test_generated_pages_say_so_on_their_first_line(pages: dict[str, str]) -> None:
    assert {text.partition("\n")[0] for text in pages.values()} == {WRITTEN}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: (d / "rows/tp.md").write_text("old", encoding="utf-8"), "rows/tp.md"),
        (lambda d: (d / "verdicts.md").unlink(), "verdicts.md"),
        (lambda d: (d / "rows/gone.md").write_text(WRITTEN, encoding="utf-8"), "rows/gone.md"),
        (lambda d: (d / "rows/tp.md").write_bytes(b"\xff"), "rows/tp.md"),
    ],
)
def test_a_page_that_differs_is_named_and_then_mended(
    tmp_path: Path, pages: dict[str, str], change: Callable[[Path], object], named: str
) -> None:
    wanted = dict(pages)
    docs.write(tmp_path, wanted)
    (tmp_path / "rows/by-hand.md").write_text("# Mine", encoding="utf-8")
    assert docs.differing(tmp_path, wanted) == []
    change(tmp_path)
    assert docs.differing(tmp_path, wanted) == [named]
    assert docs.write(tmp_path, wanted) == [named]
    assert docs.differing(tmp_path, wanted) == []
    assert (tmp_path / "rows/by-hand.md").exists()


def test_the_command_exits_1_and_writes_nothing_with_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "DOCS", tmp_path)
    done = CliRunner().invoke(main, ["docs", "--check"], standalone_mode=False)
    assert done.return_value == 1
    assert "docs/rows/tp.md: not as generated; right form: python -m conformance docs" in done.output
    assert list(tmp_path.iterdir()) == []
    assert CliRunner().invoke(main, ["docs"], standalone_mode=False).return_value == 0
    assert CliRunner().invoke(main, ["docs", "--check"], standalone_mode=False).return_value == 0


def test_without_published_results_the_pages_say_so(tmp_path: Path) -> None:
    assert "No published run has this row." in docs.pages(tmp_path)["rows/tp.md"]


@pytest.mark.parametrize("row", MATRIX.rows, ids=lambda row: row.id)
def test_a_rows_page_has_its_overrides_and_its_known_faults(row: Row, pages: dict[str, str]) -> None:
    page = pages[f"rows/{row.id}.md"]
    for variant in row.variant_names:
        for role in ROLES:
            overrides, inherited = role_overrides(row, variant, role)
            assert inherited or all(text.split("'")[0] in page for text in overrides)
    issues = [issue for issue in load_known() if issue.row == row.id]
    assert page.count("([upstream](<") == len(issues)
    assert all(f"([upstream](<{issue.link}>))" in page for issue in issues)


def kinds(page: str) -> list[str]:
    """The kinds of a page's elements, text aside: what a text could add to if it were not escaped."""
    found = []
    for token in PARSER.parse(page):
        found.append(token.type)
        found += [child.type for child in token.children or [] if child.type not in ("text", "text_special", "code_inline")]
    return found


def check_hostile_stays_text(render: Callable[[str], str]) -> None:
    assert kinds(render(HOSTILE + "\n\n# x\n\n```{eval-rst}\n```\n(a)=\n% b\n+++\n|x|")) == kinds(render("seen"))


def pages_of(text: str) -> str:
    view = View(written(text), MATRIX.rows)
    return index_page(MATRIX.rows, [view]) + "\n".join(row_page(row, [view], ()) for row in MATRIX.rows)


def test_hostile_results_stay_text() -> None:
    check_hostile_stays_text(pages_of)


def test_a_page_that_forgets_to_escape_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.report.markdown.escape", lambda text, _limit=0: text)
    with pytest.raises(AssertionError):
        check_hostile_stays_text(pages_of)


def test_a_link_stays_one_link() -> None:
    link = "https://example.org/a)[x](javascript:b)<c>\\`|"
    issue = KnownIssue(
        row="tp", check="parity", backend="plain", outcome="crash", contains=HOSTILE[:500], reason=HOSTILE[:500], link=link
    )
    page = row_page(MATRIX["tp"], [], [issue])
    links = [c.attrs["href"] for t in PARSER.parse(page) for c in t.children or [] if c.type == "link_open"]
    assert links == ["../verdicts.md", "https://example.org/a)%5Bx%5D(javascript:b)%3Cc%3E%5C%60%7C"]


def views(*headers: dict[str, object]) -> list[View]:
    tame = written("seen")
    return [View(replace(tame, header=replace(tame.header, **header)), MATRIX.rows) for header in headers]  # type: ignore[arg-type]


def test_stacks_are_told_apart_by_their_names() -> None:
    stack = (Package("verl", "0.7.0"), Package("mindspeed", "2.3.0_core_r0.12.1"), Package("megatron-core", "0.12.1"))
    several = views(
        {"stack": stack},
        {"stack": stack, "route": "worker"},
        {"stack": stack, "device": "npu"},
        {"stack": stack, "untested": ("torch 2",)},
        {"stack": stack, "backend": "plain"},
    )
    names = [
        "verl 0.7.0, MindSpeed 2.3.0_core_r0.12.1, engine, emulated NPU",
        "verl 0.7.0, MindSpeed 2.3.0_core_r0.12.1, worker, emulated NPU",
        "verl 0.7.0, MindSpeed 2.3.0_core_r0.12.1, engine, NPU",
        "verl 0.7.0, MindSpeed 2.3.0_core_r0.12.1, engine, emulated NPU, untested",
        "verl 0.7.0, plain megatron-core 0.12.1, engine, emulated NPU",
    ]
    index = index_page(MATRIX.rows, several).splitlines()
    assert f"| row | {' | '.join(names)} |" in index
    assert [line.partition("**: ")[0] for line in index if line.startswith("- **")] == [f"- **{name}" for name in names]
    page = row_page(MATRIX["tp"], several, ()).splitlines()
    assert [line for line in page if line.startswith("### ")][1:] == [f"### {name}" for name in names]


def test_the_published_stacks_have_different_names(pages: dict[str, str]) -> None:
    columns = next(line for line in pages["rows/index.md"].splitlines() if line.startswith("| row |")).split(" | ")
    assert len(columns) == len(set(columns)) > 3
    for row in MATRIX.rows:
        heads = [line for line in pages[f"rows/{row.id}.md"].splitlines() if line.startswith("#")]
        assert len(heads) == len(set(heads)) > 3


def test_a_cell_of_the_index_names_the_roles_where_they_differ() -> None:
    tame = written("seen")
    checks = tuple(replace(r, outcome="refused") if (r.row, r.role) == ("tp", "ref") else r for r in tame.checks)
    index = index_page(MATRIX.rows, [View(replace(tame, checks=checks), MATRIX.rows)])
    assert "| [TP](tp.md): tensor parallelism | actor ✅ works, ref ⛔ refused |" in index
    assert "| [PP](pp.md): pipeline parallelism | ✅ works |" in index


def test_a_known_fault_names_its_route() -> None:
    issue = KnownIssue(row="tp", check="parity", backend="plain", outcome="crash", contains="c", reason="r", link="https://a.b")
    assert "backend plain: 💥 crash" in row_page(MATRIX["tp"], [], [issue])
    with_route = issue.model_copy(update={"route": "worker"})
    assert "backend plain, route worker: 💥 crash" in row_page(MATRIX["tp"], [], [with_route])


def test_the_page_on_verdicts_follows_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    before = verdict_page(MATRIX.rows)
    assert "| dense | 4 | float32 | 5.96e-08 | 1.39e-06 | 1.97e-06 |" in before
    assert "| ❌ fail | ⛔ refused | 💥 broken | ❌ wrong numbers |" in before
    monkeypatch.setattr(parity, "RMS_FACTOR", 3.5)
    monkeypatch.setitem(parity.UNIT_ROUNDOFF, "float32", 2.0**-20)
    monkeypatch.setitem(verdict._OF_FAIL, "parity", verdict.Verdict.ERROR)
    after = verdict_page(MATRIX.rows)
    assert "| `RMS_FACTOR` | 3.5 |" in after
    assert "| dense | 4 | float32 | 9.54e-07 |" in after
    assert "| ❌ fail | ⛔ refused | 💥 broken | 🛠 error |" in after


def test_a_docstring_keeps_its_stars_and_its_code() -> None:
    def documented() -> None:
        """A bound of 4*u*sqrt(N), see `a_*b*`."""

    assert prose(documented) == "A bound of 4\\*u\\*sqrt(N), see `a_*b*`."


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@needs_sphinx
def test_sphinx_builds_it_without_a_warning(tmp_path: Path, pages: dict[str, str]) -> None:
    done = build(ROOT / "docs", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert all((tmp_path / name.replace(".md", ".html")).exists() for name in pages)


@needs_sphinx
def test_a_warning_fails_the_build(tmp_path: Path) -> None:
    source = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (source / "on-an-npu.md").open("a", encoding="utf-8") as file:
        file.write("\n[nothing there](nowhere.md)\n")
    done = build(source, tmp_path / "html")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr


@needs_sphinx
def test_sphinx_reads_hostile_results_as_text(tmp_path: Path) -> None:
    source = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    view = View(written(HOSTILE + " {ref}`x` {{ x }} $x$ |x| [x]: y ::: :::"), MATRIX.rows)
    for row in MATRIX.rows:
        (source / f"rows/{row.id}.md").write_text(row_page(row, [view], ()), encoding="utf-8")
    done = build(source, tmp_path / "html")
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "html/rows/tp.html").read_text(encoding="utf-8")
    assert "window.planted=1" in page
    assert "<script>window.planted" not in page
    assert "<img src=x" not in page
    assert 'href="javascript:' not in page
