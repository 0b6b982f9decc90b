"""What CI shows of a run: job summary, JUnit properties, badge, and the example workflow."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
import yaml
from result_sets import HOSTILE, MATRIX, result_set, with_check, with_operator

from conformance.__main__ import main
from conformance.ci import append, badge, properties, summary, summary_path, unexpected
from conformance.diff import compare, read_whole
from conformance.gate import judge, load_policy
from conformance.known import KnownIssue, load_known
from conformance.publish import published, stack_name

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
GOOD = result_set()
ISSUE = KnownIssue.model_validate(
    {
        "row": "tp",
        "check": "engaged",
        "backend": "mindspeed",
        "outcome": "crash",
        "contains": "no",
        "reason": "r",
        "link": "https://example.org",
        "roles": ("actor",),
    }
)
CRASHED = with_check(GOOD, "tp", "actor", "engaged", outcome="crash", summary="TypeError: no")


def test_what_is_not_expected() -> None:
    assert list(unexpected(GOOD, [])) == []
    assert list(unexpected(CRASHED, [])) == ["tp actor documented engaged: crash: TypeError: no"]
    assert list(unexpected(CRASHED, [ISSUE])) == []
    assert "passes now: remove the known issue" in next(unexpected(GOOD, [ISSUE]))
    assert list(unexpected(with_operator(GOOD, "fail", "why"), [])) == ["operator rms_norm: fail: why"]
    assert list(unexpected(with_operator(GOOD, "pass"), [])) == []
    for outcome in ("not_run", "unsupported"):
        assert not list(unexpected(with_check(GOOD, "tp", "actor", "engaged", outcome=outcome), []))


def test_the_shipped_reports_are_as_their_known_issues_say() -> None:
    """Also a check that the function finds what a run finds: these runs exited 0."""
    known = load_known(matrix=MATRIX)
    for directory in ROOT.glob("reports/verl0.9*"):
        assert list(unexpected(read_whole(directory), known)) == []
        assert list(unexpected(read_whole(directory), [])) != []


def test_the_summary_says_what_a_reader_looks_for() -> None:
    page = summary(GOOD, MATRIX.rows, [], [], None)
    assert "All checks as expected." in page
    assert "What changed" not in page
    page = summary(CRASHED, MATRIX.rows, [], [], GOOD)
    assert "Not as expected:\n\n- tp actor documented engaged: crash: TypeError: no" in page
    assert "| regressed | tp actor engaged |" in page
    assert "emulated" in page
    stale = summary(GOOD, MATRIX.rows, [], [ISSUE], None)
    assert "known issue matches no check" in stale
    assert "All checks as expected" not in stale
    cut = summary(replace(GOOD, footer=None), MATRIX.rows, [], [], None)
    assert "INCOMPLETE" in cut


def test_hostile_text_in_a_summary_is_escaped() -> None:
    bad = with_check(GOOD, "tp", "actor", "engaged", outcome="crash", summary=HOSTILE)
    page = summary(bad, MATRIX.rows, [], [], GOOD)
    assert not [c for c in page if unicodedata.category(c)[0] == "C" and c != "\n"]
    assert "<script>" not in page.replace("\\<", "")


def test_the_summary_is_appended_where_it_is_asked_for(tmp_path: Path) -> None:
    assert summary_path({}) is None
    assert summary_path({"GITHUB_STEP_SUMMARY": ""}) is None
    path = tmp_path / "summary"
    assert summary_path({"GITHUB_STEP_SUMMARY": str(path)}) == path
    path.write_text("before\n")
    assert append(path, "张\udcff\n") is None
    assert path.read_text(encoding="utf-8") == "before\n张?\n"
    fault = append(tmp_path / "none" / "summary", "x")
    assert fault is not None
    assert "the job summary was not written: No such file or directory" in fault


def test_what_was_published_before(tmp_path: Path) -> None:
    from result_sets import write

    assert published(tmp_path, GOOD) is None
    directory = tmp_path / stack_name(GOOD)
    write(GOOD, directory)
    assert published(tmp_path, GOOD) == GOOD
    (directory / "results.jsonl").write_bytes(b"{")
    assert published(tmp_path, GOOD) is None, "a broken file is no reason for a run to fail"


def test_the_properties_of_a_test() -> None:
    record = next(r for r in GOOD.checks if r.precision == "float32")
    assert properties(record) == [
        ("row", "tp"),
        ("role", "actor"),
        ("variant", "documented"),
        ("check", "parity"),
        ("precision", "float32"),
        ("outcome", "pass"),
    ]
    assert "precision" not in dict(properties(next(r for r in GOOD.checks if r.precision is None)))


@pytest.mark.parametrize(
    ("changes", "message", "color"),
    [
        ([], "2 of 2 rows work (emulated NPU)", "brightgreen"),
        ([("tp", "actor", "crash")], "1 of 2 rows work (emulated NPU), 1 checks not as expected", "red"),
        ([("tp", "ref", "unsupported")], "2 of 2 rows work (emulated NPU)", "brightgreen"),
        ([("tp", "ref", "not_run"), ("tp", "actor", "not_run")], "1 of 2 rows work (emulated NPU)", "yellow"),
        ([("tp", "ref", "always_on")], "1 of 2 rows work (emulated NPU), 1 checks not as expected", "red"),
    ],
)
def test_the_badge(changes: list[tuple[str, Any, str]], message: str, color: str) -> None:
    results = GOOD
    for row, role, outcome in changes:
        results = with_check(results, row, role, "engaged", outcome=outcome)
    found = badge(results, MATRIX.rows, [])
    assert found == {"schemaVersion": 1, "label": "verl + MindSpeed", "message": message, "color": color}
    json.dumps(found)


def test_a_badge_says_when_it_was_hardware() -> None:
    assert "(NPU)" in str(badge(result_set(device="npu"), MATRIX.rows, [])["message"])


@pytest.mark.stack
def test_a_run_in_two_processes_writes_junit_properties_and_the_summary(tmp_path: Path) -> None:
    env = {**os.environ, "MINDSPEED_HOME": "", "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    options = ["--row", "swiglu", "-k", "key_is_taken", "--backend", "plain", "--reports", str(tmp_path / "reports")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "conformance", f"--junitxml={tmp_path / 'junit.xml'}"]
    done = subprocess.run([*command, *options, "-n", "2"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = list(ElementTree.parse(tmp_path / "junit.xml").iter("testcase"))
    assert len(cases) == 4
    for case in cases:
        found = {p.get("name"): p.get("value") for p in case.iter("property")}
        assert found["row"] == "swiglu"
        assert (found["check"], found["outcome"]) == ("accepted", "pass")
        assert f"{found['role']}" in str(case.get("name"))
    page = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert page.startswith("## Conformance\n")
    assert "| swiglu | `use_fused_swiglu` |" in page


@pytest.mark.stack
def test_a_summary_that_cannot_be_written_is_a_line_and_no_failure(tmp_path: Path) -> None:
    env = {**os.environ, "MINDSPEED_HOME": "", "GITHUB_STEP_SUMMARY": str(tmp_path)}
    options = ["--row", "swiglu", "-k", "key_is_taken", "--backend", "plain", "--reports", str(tmp_path / "reports")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "conformance", *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the job summary was not written: Is a directory") == 1


def test_the_example_policy_is_green_on_the_shipped_reports() -> None:
    policy = load_policy(EXAMPLES / "gate.toml", MATRIX)
    for directory in ROOT.glob("reports/verl0.9*"):
        results = read_whole(directory)
        found = judge(compare(results, results, MATRIX.rows), results, MATRIX.rows, policy, datetime.date(2026, 12, 1))
        assert found.red == ()
        never = result_set(rows=("tp",), backend=results.header.backend)
        assert {f.kind for f in judge(compare(never, never, MATRIX.rows), never, MATRIX.rows, policy, datetime.date.min).red} == {
            "must work"
        }


WORKFLOW: dict[Any, Any] = yaml.safe_load((EXAMPLES / "gate-workflow.yml").read_text(encoding="utf-8"))


def test_the_example_workflow_gates_pull_requests() -> None:
    (trigger,) = (value for key, value in WORKFLOW.items() if key in ("on", True))  # YAML 1.1 reads `on` as true
    assert "pull_request" in trigger
    assert WORKFLOW["permissions"] == {"contents": "read"}
    (job,) = WORKFLOW["jobs"].values()
    assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    assert (ROOT / job["env"]["OLD"].removeprefix("base/") / "results.jsonl").is_file()
    assert (ROOT / job["env"]["STACK"]).is_file()


def commands() -> list[list[str]]:
    """Every `python -m conformance` and `python -m pytest` of the workflow, as words."""
    import shlex

    (job,) = WORKFLOW["jobs"].values()
    lines = "\n".join(step.get("run", "") for step in job["steps"]).splitlines()
    found = [shlex.split(re.split(r">>|>|\|\|", line)[0]) for line in lines if re.match("python -m (conformance|pytest)", line)]
    assert {words[2] for words in found} == {"conformance", "pytest"}
    return [words[2:] for words in found]


def test_the_example_workflow_only_uses_commands_and_options_that_exist(pytestconfig: pytest.Config) -> None:
    seen = set()
    for program, *words in commands():
        if program == "pytest":
            known = set(pytestconfig._parser.optparser._option_string_actions)
            assert {w.partition("=")[0] for w in words if w.startswith("-")} <= known
            continue
        command = main.commands[words[0]]
        seen.add(words[0])
        context = click.Context(command)
        command.parse_args(context, words[1:])  # raises for an option or an argument too many or too few
        for value in context.params.values():
            if isinstance(value, Path) and value.suffix == ".toml":
                assert load_policy(ROOT / value, MATRIX)
    assert seen == {"stack", "diff", "gate", "badge"}
