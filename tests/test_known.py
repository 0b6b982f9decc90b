"""Known issues: what an entry covers, and that it turns red on any change, for better or worse."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt
from pages import HOSTILE

from conformance.errors import UsageFault
from conformance.known import KnownIssue, judge, load_known, match, require_one_each, unused
from conformance.matrix import ROOT, load_matrix
from conformance.report.upstream_page import upstream_page
from conformance.results import CheckRecord, Header, Package, UpstreamException, read_results

HEADER = Header(
    started="2026-09-01T00:00:00Z",
    device="emulated",
    backend="mindspeed",
    precisions=("float32",),
    stack=(Package("mindspeed", "core_r0.16.0"), Package("megatron_core", "0.16.1+local")),
    matrix_sha256="0" * 64,
    rows=("tp", "mc2"),
    complete_selection=True,
)
RECORD = CheckRecord(
    row="mc2",
    role="actor",
    variant="documented",
    check="engaged",
    precision=None,
    outcome="crash",
    summary="crashed at model build",
    exception=UpstreamException("TypeError", "unexpected keyword 'tp_group'", "adaptor.py:27 __init__", "MindSpeed"),
)
ENTRY = {
    "row": "mc2",
    "check": "engaged",
    "backend": "mindspeed",
    "outcome": "crash",
    "exception": "TypeError",
    "contains": "tp_group",
    "reason": "no tp_group parameter",
    "link": "https://example.org/1",
}
TEXT = """\
issues:
  - row: mc2
    check: engaged
    backend: mindspeed
    outcome: crash
    versions: {mindspeed: core_r0.16.0, megatron-core: "==0.16.*"}
    contains: tp_group
    reason: no tp_group parameter
    link: https://example.org/1
"""


def entry(**fields: object) -> KnownIssue:
    return KnownIssue.model_validate({**ENTRY, **fields})


def test_the_shipped_list_loads_and_names_rows_that_exist() -> None:
    load_known(matrix=load_matrix())


@pytest.fixture(scope="module")
def covered() -> list[tuple[KnownIssue, CheckRecord]]:
    """Each entry of the shipped list with each check of the published runs that it covers."""
    runs = [read_results(path) for path in sorted(ROOT.glob("reports/*/results.jsonl"))]
    return [(e, r) for run in runs for e in load_known() if e.applies(run.header) for r in run.checks if e.covers(r)]


def saying(record: CheckRecord, text: str) -> CheckRecord:
    raised = replace(record.exception, message=text) if record.exception else None
    return replace(record, summary=text, exception=raised)


def test_another_fault_in_place_of_any_known_one_differs(covered: list[tuple[KnownIssue, CheckRecord]]) -> None:
    assert {e.model_dump_json() for e, _ in covered} == {e.model_dump_json() for e in load_known()}, "a run for each entry"
    for issue, record in covered:
        assert judge(issue, record) is None, "the published runs are as the list says"
        assert judge(issue, saying(record, "another fault")) is not None, issue
    distinct = {(issue.reason, r.outcome, r.summary): r for issue, r in covered}
    for issue in load_known():
        taken = [
            summary for (reason, _, summary), record in distinct.items() if reason != issue.reason and not judge(issue, record)
        ]
        assert not taken, f"{issue.row}, {issue.contains!r} is said by another known fault too: {taken}"


def test_every_entry_says_where_it_was_found() -> None:
    """By link: a thread, or a file at a commit with its line; not a repository as a whole, nor a line that moves."""
    for issue in load_known():
        parts = urlsplit(issue.link)
        assert len(parts.path.strip("/").split("/")) > 2, f"{issue.row}: {issue.link} is no place"
        if parts.fragment.startswith("L"):
            assert re.search(r"/blob/([0-9a-f]{40}|v[0-9.]+|core_v[0-9.]+)/", parts.path), f"{issue.row}: {issue.link} will move"
        if issue.backend == "mindspeed":
            assert set(issue.versions) == {"verl", "megatron-core", "mindspeed"}


def test_a_good_entry_loads(tmp_path: Path) -> None:
    path = tmp_path / "known_issues.yaml"
    path.write_text(TEXT, encoding="utf-8")
    (issue,) = load_known(path, load_matrix())
    assert issue.roles == ("actor", "ref")
    assert match([issue], RECORD, HEADER) is issue


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("row: mc2", "row: mc", r":2: row 'mc': key 'row': no such row; right form: did you mean 'mc2'\?"),
        (
            "    check:",
            "    variant: efective\n    check:",
            r":3: row 'mc2': key 'variant': no such variant.*'effective'",
        ),
        ("check: engaged", "check: engage", r":3: row 'mc2': key 'check': 'engage' is not allowed; right form: one of"),
        ("outcome: crash", "outcome: pass", r":5: row 'mc2': key 'outcome': 'pass' is not allowed"),
        ("outcome: crash", "outcome: error", r":5: .*'error' is not allowed"),
        (
            "==0.16.*",
            "0.16",
            r":6: row 'mc2': key 'versions\.megatron-core': '0\.16' is not a version specifier; right form: PEP 440",
        ),
        (
            "mindspeed: core_r0.16.0",
            'MindSpeed: "==0.16.*"',
            r":6: row 'mc2': key 'versions\.MindSpeed': '==0\.16\.\*' is no branch; right form: .*, such as core_r0\.16\.0",
        ),
        ("    contains: tp_group\n", "", r":2: row 'mc2': key 'contains': missing; right form: see the published schema"),
        ("contains: tp_group", 'contains: ""', r":7: row 'mc2': key 'contains': empty text"),
        ("contains: tp_group", 'contains: " "', r":7: row 'mc2': key 'contains': blank text; right form: some words"),
        ("https://example.org/1", "https://", r":9: row 'mc2': key 'link': 'https://' is not a link; right form: https"),
        ("https://", "javascript:", r":9: row 'mc2': key 'link': .*is not a link; right form: https"),
        ("    reason: no tp_group parameter\n", "", r":2: row 'mc2': key 'reason': missing"),
        ("backend: mindspeed", "backend: Mindspeed", r":4: .*'backend': 'Mindspeed' is not allowed"),
        ("    link", "    url: x\n    link", r":9: row 'mc2': key 'url': unknown field"),
        ("issues:\n", "issues:\n  - {}\n", r":2: row number 1: key 'row': missing"),
    ],
)
def test_a_fault_is_one_line_with_its_place(tmp_path: Path, old: str, new: str, wanted: str) -> None:
    path = tmp_path / "known_issues.yaml"
    assert TEXT.count(old) == 1
    path.write_text(TEXT.replace(old, new), encoding="utf-8")
    with pytest.raises(UsageFault) as caught:
        load_known(path, load_matrix())
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert re.match(wanted, message.removeprefix(str(path))), message


@pytest.mark.parametrize(
    ("fields", "covered"),
    [
        ({}, True),
        ({"row": "tp"}, False),
        ({"check": "parity"}, False),
        ({"roles": ["ref"]}, False),
        ({"roles": ["actor"]}, True),
        ({"variant": "effective"}, False),
        ({"backend": "plain"}, False),
        ({"route": "engine"}, True),
        ({"route": "worker"}, False),
        ({"precision": "float32"}, False),
        ({"versions": {"mindspeed": "core_r0.16.0", "megatron-core": ">=0.16.1"}}, True),
        ({"versions": {"MindSpeed": "core_r0.16.0"}}, True),
        ({"versions": {"mindspeed": "core_r0.16"}}, False),
        ({"versions": {"mindspeed": "master"}}, False),
        ({"versions": {"megatron-core": "<0.16"}}, False),
        ({"versions": {"mbridge": ">=0"}}, False),
    ],
)
def test_what_an_entry_covers(fields: dict[str, object], covered: bool) -> None:
    candidate = entry(**fields)
    assert match([candidate], RECORD, HEADER) == (candidate if covered else None)


def test_a_version_that_is_none_makes_a_versioned_entry_not_apply() -> None:
    header = replace(HEADER, stack=(Package("megatron-core", "a checkout"),))
    assert match([entry(versions={"megatron-core": ">=0"})], RECORD, header) is None
    assert match([entry()], RECORD, header) is not None


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ({}, {"reason": "again"}, True),
        ({}, {"roles": ["actor"]}, True),
        ({"roles": ["ref"]}, {"roles": ["actor"]}, False),
        ({}, {"check": "accepted"}, False),
        ({}, {"variant": "effective"}, False),
        ({"check": "parity", "precision": "float32"}, {"check": "parity"}, True),
        ({"check": "parity", "precision": "float32"}, {"check": "parity", "precision": "bfloat16"}, False),
        ({}, {"versions": {"mindspeed": "master"}}, False),
    ],
)
def test_two_entries_for_one_check_are_refused(one: dict[str, Any], other: dict[str, Any], clash: bool) -> None:
    entries = [entry(**one), entry(**other)]
    said = pytest.raises(UsageFault, match=r"two entries hold for one check \(mc2, actor, documented, \w+\); right form: one")
    with said if clash else contextlib.nullcontext():
        require_one_each(entries, HEADER)


def test_judge_is_strict_both_ways() -> None:
    assert judge(entry(), RECORD) is None
    raised = RECORD.exception
    assert raised is not None
    for record, wanted in [
        (replace(RECORD, outcome="pass", exception=None), "passes now: remove the known issue (https://example.org/1)"),
        (replace(RECORD, outcome="no_effect"), "expected crash, is no_effect"),
        (replace(RECORD, outcome="error"), "expected crash, is error"),
        (replace(RECORD, outcome="not_run"), "expected crash, is not_run"),
        (replace(RECORD, exception=None), "expected TypeError, got no exception"),
        (replace(RECORD, exception=replace(raised, type="ValueError")), "expected TypeError, got ValueError"),
        (
            replace(RECORD, exception=replace(raised, message="other")),
            "expected a message with 'tp_group', got 'other'",
        ),
    ]:
        difference = judge(entry(), record)
        assert difference is not None
        assert wanted in difference
    silent = replace(RECORD, outcome="no_effect", exception=None, summary="never read")
    assert judge(entry(outcome="no_effect", exception=None, contains="never read"), silent) is None


def test_an_entry_that_matched_nothing_is_unused_if_it_should_have() -> None:
    matched, idle = entry(), entry(check="accepted")
    elsewhere, older = entry(row="cp"), entry(versions={"mindspeed": "2.3.0_core_r0.12.1"})
    assert unused([matched, idle, elsewhere, older], [matched], HEADER) == (idle,)


def test_the_page_of_faults_has_each_once_with_all_its_links_rows_and_texts() -> None:
    known = load_known()
    lines = [line for line in upstream_page(load_matrix().rows, known).splitlines() if line.startswith("| ")][1:]
    reasons = list(dict.fromkeys(issue.reason for issue in known))
    assert len(lines) == len(reasons)
    for line, reason in zip(lines, reasons, strict=True):
        for issue in known:
            if issue.reason == reason:
                assert f"](<{issue.link}>)" in line
                assert f"](rows/{issue.row}.md)" in line
                assert f"`{issue.contains}`" in line
                assert all(wanted.removeprefix("==") in line for package, wanted in issue.versions.items() if package == "verl")


def test_hostile_text_on_the_page_of_faults_stays_in_its_cell() -> None:
    rows = load_matrix().rows
    plain = upstream_page(rows, [entry()])
    hostile = upstream_page(rows, [entry(reason=HOSTILE[:500], contains=HOSTILE[:500], link="https://x.org/a/`|<b>\\/c")])
    assert kinds(hostile) == kinds(plain)


def kinds(page: str) -> list[str]:
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    return [c.type for t in tokens for c in (t, *(t.children or [])) if c.type not in ("text", "text_special", "code_inline")]
