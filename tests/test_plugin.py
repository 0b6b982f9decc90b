"""`pytest conformance` as a user types it: selection, bad input, exit codes. Each test is a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.matrix import load_matrix
from conformance.results import read_results
from conformance.whole import is_narrowed, is_whole

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MINDSPEED_HOME": "", "PYTHONPATH": "", **environment}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "conformance", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def selected(*arguments: str) -> set[str]:
    """Ids of the rows of the tests that are collected."""
    done = run("--collect-only", "-q", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.partition("[")[2] for line in done.stdout.splitlines() if line.startswith("conformance/test_matrix.py::")]
    ids = sorted(load_matrix().ids(), key=len, reverse=True)
    return {next(i for i in ids if name.startswith(f"{i}-")) for name in names}


def test_k_selects_the_row_and_nothing_else() -> None:
    assert selected("-k", "ep") == {"ep"}
    assert selected("-k", "mla") == {"mla"}


def test_row_is_exact() -> None:
    assert selected("--row", "tp") == {"tp"}
    assert selected("--row", "tp", "--row", "mc2") == {"tp", "mc2"}
    assert selected("-k", "tp") == {"tp", "etp"}, "a substring: that is what --row is for"


def test_without_a_selection_every_row_is_collected() -> None:
    assert selected() == set(load_matrix().ids())


def one_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit code 2, one line that says it, no traceback."""
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert "Traceback" not in output
    lines = [line for line in output.splitlines() if all(word in line for word in words)]
    assert len(lines) == 1, output


def test_unknown_row() -> None:
    one_line(run("--row", "nope", "--collect-only"), "--row nope", "no such row", "tp, pp, ep")


def test_unknown_hypothesis_profile() -> None:
    one_line(run("--collect-only", "--hypothesis-profile", "nope"), "--hypothesis-profile nope", "right form: ci or nightly")


def test_processes_that_would_share_the_devices_are_refused() -> None:
    one_line(
        run("--row", "tp", "--npu", "real", "-n", "2", "--backend", "plain"), "--npu real -n", "share the devices", "right form"
    )


def test_mindspeed_home_that_is_none(tmp_path: Path) -> None:
    one_line(run("--row", "tp", MINDSPEED_HOME=str(tmp_path)), "MINDSPEED_HOME", "no MindSpeed source there")


def test_mindspeed_wanted_and_absent() -> None:
    one_line(run("--row", "tp", "--backend", "mindspeed"), "no MindSpeed found", "MINDSPEED_HOME=")


@pytest.mark.stack
def test_a_broken_dependency_is_named(tmp_path: Path) -> None:
    (tmp_path / "site" / "tensordict").mkdir(parents=True)
    (tmp_path / "site" / "tensordict" / "__init__.py").write_text("def (\n")
    done = run("--row", "pp", "--backend", "plain", "--reports", str(tmp_path / "reports"), PYTHONPATH=str(tmp_path / "site"))
    one_line(done, "cannot be imported: tensordict", "(wanted: tensordict==", "is broken: SyntaxError", "right form")
    assert not list((tmp_path / "reports" / "runs").iterdir())


@pytest.mark.stack
def test_reports_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("a file, not a directory")
    one_line(run("--row", "tp", "--reports", str(tmp_path / "reports")), "cannot make a directory for results")
    assert (tmp_path / "reports").read_text() == "a file, not a directory"


def copy_of_the_project(target: Path) -> None:
    for name in ("conformance", "fixtures", "stacks"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml", "known_issues.yaml", "matrix.yaml"):
        shutil.copy(ROOT / name, target / name)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("parity: reordered", "parity: sorted", ("matrix.yaml:", "'tp'", "parity", "right form")),
        ("    world_size: 2\n", "    world_size: 2\n    world_size: 2\n", ("matrix.yaml:", "duplicate key")),
    ],
)
def test_bad_matrix(tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    copy_of_the_project(tmp_path)
    text = (ROOT / "matrix.yaml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "matrix.yaml").write_text(text.replace(old, new, 1), encoding="utf-8")
    one_line(run("--collect-only", cwd=tmp_path), *words)


@pytest.mark.stack
def test_a_run_writes_results_and_tables_and_says_where(tmp_path: Path) -> None:
    done = run("--row", "swiglu", "--backend", "plain", "--reports", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[16/16" in done.stdout
    assert "not_run" in done.stdout
    directory = next((tmp_path / "runs").iterdir())
    written = {"results.jsonl", "support-table.md", "support-table.zh.md", "support-table.html"}
    assert {path.name for path in directory.iterdir()} == written
    assert "--row swiglu" in (directory / "support-table.md").read_text(encoding="utf-8")
    assert not [p for p in tmp_path.iterdir() if p.name != "runs"], "a part of the rows is not published"


@pytest.mark.stack
def test_a_known_issue_that_is_none_fails_the_run(tmp_path: Path) -> None:
    copy_of_the_project(tmp_path)
    entry = "issues: [{row: pp, check: engaged, backend: plain, outcome: crash, contains: x, reason: r, link: 'https://a.org'}]\n"
    (tmp_path / "known_issues.yaml").write_text(entry, encoding="utf-8")
    done = run("--row", "pp", "--backend", "plain", "--reports", str(tmp_path / "reports"), cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    failures = [line for line in done.stdout.splitlines() if line.startswith("known issue: expected crash, passes now")]
    assert len(failures) == 2, "one for actor, one for ref"


@pytest.mark.stack
def test_a_run_cut_short_is_not_complete(tmp_path: Path) -> None:
    copy_of_the_project(tmp_path)
    entry = (
        "issues: [{row: pp, check: accepted, backend: plain, outcome: crash, contains: x, reason: r, link: 'https://a.org'}]\n"
    )
    (tmp_path / "known_issues.yaml").write_text(entry, encoding="utf-8")
    done = run("--row", "pp", "-x", "--backend", "plain", "--reports", str(tmp_path / "reports"), cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    results = read_results(next((tmp_path / "reports" / "runs").iterdir()))
    assert len(results.checks) == 1
    assert not results.complete
    assert "not run to its end; --resume reports/runs/" in done.stdout


@pytest.mark.stack
def test_a_known_issue_that_matches_no_check_fails_a_whole_run(tmp_path: Path) -> None:
    # Rows of one's own: the whole run is one row then.
    row = re.search(r"  - id: swiglu\n.*?(?=\n  - id:)", (ROOT / "matrix.yaml").read_text(encoding="utf-8"), re.DOTALL)
    assert row is not None
    (tmp_path / "rows.yaml").write_text(f"rows:\n{row[0]}\n", encoding="utf-8")
    entry = "{row: swiglu, check: engaged, precision: float32, backend: plain, outcome: crash, contains: x, reason: r, link: 'https://a.org'}"
    arguments = ("--matrix", str(tmp_path / "rows.yaml"), "--backend", "plain", "--reports", str(tmp_path / "reports"))
    stale = f"issues: [{entry}]\n"
    for text, narrower, code in ((stale, (), 1), (stale, ("-k", "taken"), 0), ("issues: []\n", (), 0)):
        (tmp_path / "known_issues.yaml").write_text(text, encoding="utf-8")
        done = run(*arguments, *narrower)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("known_issues.yaml: matches no check of this run: swiglu" in done.stdout) is bool(code)


@pytest.mark.parametrize(
    ("arguments", "narrowed"),
    [
        ([], False),
        (["-n", "2"], False),
        (["-k", "ep"], True),
        (["-m", "operator"], True),
        (["--deselect", "conformance/test_matrix.py::test_parity"], True),
        (["conformance/test_matrix.py::test_parity"], True),
        ([str(ROOT / "conformance" / "test_operators.py")], True),
        ([str(ROOT / "conformance")], False),
        (["--lf"], True),
        (["--ignore", "conformance/test_operators.py"], True),
    ],
)
def test_what_leaves_tests_out(pytester: pytest.Pytester, arguments: list[str], narrowed: bool) -> None:
    assert is_narrowed(pytester.parseconfig(*arguments)) is narrowed


def test_a_set_that_lacks_a_record_is_not_whole() -> None:
    results = read_results(ROOT / "reports" / "verl0.9.1-core0.16.1-mindspeed-emulated")
    rows, families = load_matrix().rows, {record.family for record in results.operators}
    assert families
    assert is_whole(results, rows, families)
    assert not is_whole(replace(results, checks=results.checks[1:]), rows, families)
    assert not is_whole(replace(results, operators=results.operators[1:]), rows, families)


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conformance", "explain", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_explain_is_ready_to_paste() -> None:
    done = explain("noop-layers")
    assert done.returncode == 0
    assert "'++actor_rollout_ref.actor.megatron.override_transformer_config.noop_layers='\"'\"'4,5'\"'\"'' \\" in done.stdout
    assert "inherits the actor's" in done.stdout


def test_explain_an_unknown_row() -> None:
    done = explain("nope")
    assert done.returncode == 2
    assert done.stderr.startswith("error: nope: no such row")
    assert done.stderr.count("\n") == 1
