"""The README's tables are what its commands write from the committed results, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance.diff import compare, read_whole
from conformance.matrix import load_matrix
from conformance.report import short, upgrade
from conformance.report.difference import to_markdown
from conformance.results import read_results

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROWS = load_matrix().rows
NEW = ROOT / "reports" / "verl0.9.1-core0.16.1-mindspeed-emulated"
OLD = ROOT / "reports" / "verl0.7.0-core0.12.1-mindspeed-emulated-worker"


def between(begin: str, end: str) -> str:
    return README.partition(begin)[2].partition(end)[0].strip()


def test_the_table_is_as_written() -> None:
    assert between(short.BEGIN, short.END) == short.short_table(read_results(NEW), ROWS)


def test_the_upgrade_is_as_written() -> None:
    assert between(upgrade.BEGIN, upgrade.END) == upgrade.upgrade_table(read_whole(OLD), read_whole(NEW), ROWS)
    committed = (ROOT / "reports" / "upgrade-verl0.7.0-to-verl0.9.1.md").read_text(encoding="utf-8")
    assert committed.strip() == to_markdown(compare(read_whole(OLD), read_whole(NEW), ROWS)).strip()


@pytest.mark.parametrize("page", ["README.md", "DEVELOPERS.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
