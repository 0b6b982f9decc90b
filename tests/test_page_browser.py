"""The HTML page in a real browser, from a file: what is shown, what a script and a stylesheet do, and that nothing else runs.

A page of our own holds the report in a frame of a given width, works it as a reader would and writes what it saw into itself.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pages import HOSTILE, MATRIX, results, written

from conformance.report.page import render_page
from conformance.results import ResultSet

BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")
PHONE, DESKTOP = 360, 1360

HARNESS = """<!doctype html><meta charset="utf-8"><body style="margin:0">
<iframe id="frame" src="page.html" width="{width}" height="900" style="border:0" {sandbox}></iframe><pre id="seen"></pre>
<script>
document.getElementById("frame").onload = (event) => {{
  const window_ = event.target.contentWindow, page = event.target.contentDocument;
  const all = (selector) => [...page.querySelectorAll(selector)];
  const visible = (element) => element.getClientRects().length > 0;
  const change = (element, type) => element.dispatchEvent(new window_.Event(type, {{bubbles: true}}));
  const wait = () => new Promise((done) => setTimeout(done, 50));
  (async () => {{ {body} }})().catch((fault) => ({{fault: String(fault)}}))
    .then((seen) => {{ document.getElementById("seen").textContent = JSON.stringify(seen); }});
}};
</script>"""


def look(directory: Path, page: str, body: str, *flags: str, width: int = DESKTOP, sandbox: str = "") -> Any:
    """What the script `body` returns, run beside the page in a frame `width` pixels wide."""
    assert BROWSER is not None
    (directory / "page.html").write_text(page, encoding="utf-8")
    (directory / "harness.html").write_text(HARNESS.format(width=width, sandbox=sandbox, body=body), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", *flags]
    command += [f"--user-data-dir={directory / 'profile'}", "--allow-file-access-from-files", "--virtual-time-budget=20000"]
    command += ["--dump-dom", (directory / "harness.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    assert found[1], f"the frame did not load: {done.stderr[-2000:]}"
    return json.loads(html.unescape(found[1]))


def render(*runs: ResultSet) -> str:
    return render_page(runs[-1], runs, MATRIX.rows)


OPEN_ALL = "all('details').forEach((d) => { d.open = true; });"


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_hostile_text_does_not_run_and_does_not_widen_the_page(tmp_path: Path, width: int) -> None:
    page = render(written(HOSTILE, "2026-08-01T00:00:00Z"), written(HOSTILE))
    body = f"""{OPEN_ALL} await wait();
      all('.copier').slice(0, 3).forEach((b) => b.click()); await wait();
      return {{planted: typeof window_.planted, width: page.documentElement.scrollWidth, inner: window_.innerWidth,
               title: page.title, scripts: all('script').length, images: all('img').length, links: all('a').length}};"""
    seen = look(tmp_path, page, body, width=width)
    assert seen["planted"] == "undefined"
    assert (seen["width"], seen["inner"]) == (width, width)
    assert seen["title"] == "Support table / 支持情况表"
    assert (seen["scripts"], seen["images"], seen["links"]) == (1, 0, 1)


@pytest.mark.parametrize(("policy", "planted"), [(True, "undefined"), (False, "number")])
def test_the_policy_stops_a_script_that_got_in(tmp_path: Path, policy: bool, planted: str) -> None:
    page = render(results()).replace("<main", "<script>window.planted = 1</script><main", 1)
    if not policy:
        page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert look(tmp_path, page, "return {planted: typeof window_.planted};") == {"planted": planted}


def test_search_filters_and_roles(tmp_path: Path) -> None:
    body = """const search = page.getElementById('search'), count = () => page.getElementById('count').textContent;
      const shown = () => all('.line').filter(visible).length, seen = {start: [shown(), count()]};
      search.value = 'mc2 ASCEND'; change(search, 'input'); seen.searched = [shown(), count()];
      search.value = 'no such text'; change(search, 'input'); seen.none = [shown(), visible(page.getElementById('nothing'))];
      search.value = ''; const box = page.querySelector('[value=WORKS]'); box.checked = true; change(box, 'input');
      seen.works = shown();
      seen.ref = all('td.ref').filter(visible).length > 0;
      page.getElementById('show-ref').checked = false; await wait();
      seen.noRef = all('td.ref').filter(visible).length;
      return seen;"""
    checks = [r for r in written("seen").checks if r.row == "tp"]
    lines = sum(len(row.variant_names) for row in MATRIX.rows)
    seen = look(tmp_path, render(results(*checks)), body)
    assert seen == {
        "start": [lines, str(lines)], "searched": [2, "2"], "none": [0, True], "works": 1, "ref": True, "noRef": 0,
    }  # fmt: skip


LANGUAGES = """const h1 = () => page.querySelector('h1').innerText.trim(), seen = [[h1(), page.documentElement.lang]];
  page.getElementById('lang-zh').click(); await wait(); seen.push([h1(), page.documentElement.lang]); return seen;"""


def test_one_language_at_a_time(tmp_path: Path) -> None:
    seen = look(tmp_path, render(results()), LANGUAGES, "--lang=en-US")
    assert seen == [["Support table", "en"], ["支持情况表", "zh"]]


def test_without_a_script_the_page_can_be_read(tmp_path: Path) -> None:
    body = f"""{OPEN_ALL} await wait();
      const seen = {{search: visible(page.getElementById('filters')), buttons: all('.copier').filter(visible).length,
        lines: all('.line').filter(visible).length, overrides: all('.copy code').filter(visible).length}};
      page.getElementById('lang-zh').checked = true; await wait(); seen.title = page.querySelector('h1').innerText.trim();
      return seen;"""
    seen = look(tmp_path, render(written("seen")), body, sandbox='sandbox="allow-same-origin"')
    assert (seen["search"], seen["buttons"], seen["title"]) == (False, 0, "支持情况表")
    assert seen["lines"] == sum(len(row.variant_names) for row in MATRIX.rows)
    assert seen["overrides"] >= seen["lines"]


def test_a_cell_opens_under_its_whole_line(tmp_path: Path) -> None:
    body = """const cell = page.getElementById('tp-documented-ref-parity'), seen = {};
      const panel = cell.querySelector('.panel'), line = cell.closest('tr');
      seen.closed = panel.checkVisibility({contentVisibilityAuto: true, visibilityProperty: true});
      cell.querySelector('summary').focus(); seen.focus = page.activeElement.tagName;
      page.activeElement.click(); await wait();
      seen.open = panel.checkVisibility({contentVisibilityAuto: true, visibilityProperty: true});
      seen.width = Math.round(panel.getBoundingClientRect().width - line.getBoundingClientRect().width);
      seen.below = panel.getBoundingClientRect().top >= cell.querySelector('summary').getBoundingClientRect().bottom - 1;
      const head = page.querySelector('thead tr:last-child th:last-child').getBoundingClientRect();
      seen.column = Math.round(head.left - cell.querySelector('summary').getBoundingClientRect().left);
      return seen;"""
    seen = look(tmp_path, render(written("seen")), body)
    assert seen == {"closed": False, "focus": "SUMMARY", "open": True, "width": 0, "below": True, "column": 0}


def test_copying_takes_exactly_the_overrides(tmp_path: Path) -> None:
    body = """const detail = page.querySelector('.line details'); detail.open = true; await wait();
      const button = detail.querySelector('.copier'); button.click(); await wait();
      return {selected: window_.getSelection().toString(), text: detail.querySelector('.copy code').textContent};"""
    seen = look(tmp_path, render(written("seen")), body)
    overrides = MATRIX.rows[0].overrides("documented", "on")
    assert seen["text"] == " \\\n".join(overrides)
    assert seen["selected"].split() == seen["text"].split()


def test_on_paper_everything_is_open(tmp_path: Path) -> None:
    body = """const closed = () => all('details:not([open])').length, seen = [closed() > 0];
      window_.dispatchEvent(new window_.Event('beforeprint')); seen.push(closed());
      window_.dispatchEvent(new window_.Event('afterprint')); seen.push(closed() > 0); return seen;"""
    assert look(tmp_path, render(written("seen")), body) == [True, 0, True]


@pytest.mark.parametrize(("scheme", "dark"), [("1", False), ("0", True)])
def test_the_page_follows_the_readers_colours(tmp_path: Path, scheme: str, dark: bool) -> None:
    body = "return {paper: window_.getComputedStyle(page.body).backgroundColor};"
    seen = look(tmp_path, render(results()), body, f"--blink-settings=preferredColorScheme={scheme}")
    assert (sum(map(int, re.findall(r"\d+", seen["paper"]))) < 3 * 128) == dark
