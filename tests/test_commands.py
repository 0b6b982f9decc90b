"""The commands as a user types them: exit codes, one line for each fault, and files from strangers."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from result_sets import HOSTILE, result_set, with_check, write

from conformance import __main__
from conformance.results import ResultSet, encode

ROOT = Path(__file__).resolve().parents[1]
GOOD = result_set()
CRASHED = with_check(GOOD, "tp", "actor", "engaged", outcome="crash", summary=HOSTILE)


def run(*arguments: str | Path, text: bool = True, **environment: str) -> subprocess.CompletedProcess[Any]:
    env = {**os.environ, "MINDSPEED_HOME": "", "PYTHONPATH": "", **environment}
    command = [sys.executable, "-m", "conformance", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=text, timeout=120)


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """In this process, which is faster; what is printed is in capsys."""
    monkeypatch.setattr(sys, "argv", ["conformance", *map(str, arguments)])
    return __main__.run()


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(GOOD, tmp_path / "good")


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    return write(CRASHED, tmp_path / "crashed")


def test_exit_codes_as_documented(good: Path, crashed: Path) -> None:
    assert run("gate", good, "--against", good).returncode == 0
    assert run("diff", good, crashed).returncode == 0
    assert run("gate", crashed, "--against", good).returncode == 1
    assert run("gate", good, "--against", crashed).returncode == 0
    for arguments in (["gate", good], ["nope"], [], ["diff", good], ["badge", good, "--loud"], ["explain", "nope"]):
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert arguments == [] or done.stderr.count("\n") == 1
    text = __main__.__doc__ or ""
    for code, meaning in [(0, "all as expected"), (1, "a verdict differs"), (2, "usage or environment"), (4, "interrupted")]:
        assert f"{code} {meaning}" in " ".join(text.split())


def test_an_error_of_ours_is_3_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path
) -> None:
    def broken(*_arguments: object) -> str:
        raise KeyError("a\nb\x1b[31m")

    monkeypatch.setattr(__main__, "to_terminal", broken)
    assert called(monkeypatch, "diff", good, good) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: of this suite: KeyError: ")
    assert "(test_commands.py:" in error
    assert error.count("\n") == 1
    assert "\x1b" not in error


@pytest.mark.parametrize("raised", [KeyboardInterrupt, click.Abort])
def test_an_interruption_is_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], good: Path, raised: type[BaseException]
) -> None:
    def interrupted(*_arguments: object) -> str:
        raise raised

    monkeypatch.setattr(__main__, "to_terminal", interrupted)
    assert called(monkeypatch, "diff", good, good) == 4
    assert capsys.readouterr().err == "error: interrupted\n"


def test_a_pipe_is_no_results_and_does_not_hang(tmp_path: Path, good: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = run("diff", str(pipe), str(good))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "not a file" in done.stderr


def test_a_reader_that_went_away_is_no_traceback(good: Path, crashed: Path) -> None:
    command = f"{sys.executable} -m conformance diff {good} {crashed} --format json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.returncode in (0, 4), "0 if it was written before the reader left"


def test_a_full_disk_is_2_and_one_line(good: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "conformance", "diff", str(good), str(good)]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert "error: output: No space left on device\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_a_terminal_that_is_not_utf8_is_no_error(good: Path) -> None:
    for command in (["explain", "tp"], ["table", good], ["diff", good, good]):
        done = run(*command, PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")
        assert (done.returncode, done.stderr) == (0, ""), command


@pytest.mark.parametrize("form", ["terminal", "markdown", "json"])
def test_forms_of_the_diff(good: Path, crashed: Path, form: str) -> None:
    done = run("diff", good, crashed, "--format", form)
    assert (done.returncode, done.stderr) == (0, "")
    assert "regressed" in done.stdout
    assert "\x1b" not in done.stdout
    if form == "json":
        assert json.loads(done.stdout)["checks"][0]["change"] == "regressed"


def test_the_gate_with_a_policy(tmp_path: Path, good: Path, crashed: Path) -> None:
    policy = tmp_path / "gate.toml"
    for until, code in [("2999-01-01", 0), ("2020-01-01", 1)]:
        policy.write_text(f'[[waiver]]\nrow = "tp"\nuntil = {until}\nreason = "known"\n')
        done = run("gate", crashed, "--against", good, "--policy", policy)
        assert done.returncode == code, done.stdout
        assert ("waiver past its date: tp: waived until 2020-01-01: known" in done.stdout) == (code == 1)
        assert "\x1b" not in done.stdout
    policy.write_text("[[waiver]]\n")
    done = run("gate", crashed, "--against", good, "--policy", policy)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "gate.toml:1: row number 1: key 'until': missing" in done.stderr


def test_promote_writes_only_when_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import hashlib

    matrix = tmp_path / "matrix.yaml"
    matrix.write_bytes((ROOT / "matrix.yaml").read_bytes().replace(b"status: Preview", b"status: Dev", 1))
    monkeypatch.setattr(__main__, "MATRIX", matrix)
    before = matrix.read_bytes()
    now = __main__._now()
    sha256 = hashlib.sha256(before).hexdigest()
    started = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    results = write(result_set(rows=("tp",), matrix_sha256=sha256, started=started), tmp_path / "set")
    assert called(monkeypatch, "promote", results) == 0
    assert "tp: Dev -> Preview" in capsys.readouterr().out
    assert matrix.read_bytes() == before
    assert called(monkeypatch, "promote", results, "--write") == 0
    assert "1 rows of matrix.yaml were edited" in capsys.readouterr().out
    assert matrix.read_bytes() == (ROOT / "matrix.yaml").read_bytes()
    assert called(monkeypatch, "promote", results, "--max-age", "0") == 2


@pytest.mark.stack
def test_stack_says_what_is_there() -> None:
    done = run("stack")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"verl           {importlib.metadata.version('verl')}" in done.stdout
    assert "documented" in done.stdout


def test_stack_with_a_wrong_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run("stack", MINDSPEED_HOME=str(tmp_path))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no MindSpeed source there" in done.stderr
    monkeypatch.delenv("MINDSPEED_HOME", raising=False)
    monkeypatch.setattr("conformance.stack.installed_version", lambda _name: None)
    assert called(monkeypatch, "stack") == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: missing: torch==")
    assert "to change it" in said.out


def spoilt(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A set whose second line was changed."""
    lines = [encode(GOOD.header), *map(encode, GOOD.checks)]
    record = json.loads(lines[1])
    change(record)
    lines[1] = json.dumps(record).encode() + b"\n"
    return b"".join(lines)


HOSTILE_FILES: dict[str, bytes] = {
    "empty": b"",
    "binary": bytes(range(256)) * 10,
    "deep": encode(GOOD.header) + b"[" * 100_000 + b"\n",
    "a kind with escapes": spoilt(lambda r: r.update(kind="\x1b[31m\u202e\nx")),
    "a row with escapes": spoilt(lambda r: r.update(row="\x1b[31m\u202e\nx")),
    "a key with escapes": spoilt(lambda r: r.update({"\x1b[31m\u202e\nx": 1})),
    "a path as an outcome": spoilt(lambda r: r.update(outcome="/etc/passwd")),
    "a huge number": spoilt(lambda r: r.update(wall_s=10**400)),
    "NaN": spoilt(lambda r: r.update(wall_s=math.nan)),
    "Infinity": spoilt(lambda r: r.update(wall_s=-math.inf)),
    "NaN deep in a detail": spoilt(lambda r: r.update(detail={"figures": {"loss": [math.nan]}})),
    "an overflow": spoilt(lambda r: r.update(wall_s=0.125)).replace(b": 0.125", b": 1e999"),
    "a key twice": spoilt(dict.copy).replace(b'"outcome": "pass"', b'"outcome": "pass", "outcome": "fail"', 1),
    "a key twice in a detail": spoilt(lambda r: r.update(detail={"a": [{"b": 1}]})).replace(b'{"b": 1}', b'{"b": 1, "b": 2}'),
    "no footer": spoilt(dict.copy),
}


@pytest.mark.parametrize("name", list(HOSTILE_FILES))
@pytest.mark.parametrize("command", ["diff", "gate", "badge", "promote"])
def test_a_results_file_from_a_stranger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, good: Path, name: str, command: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(HOSTILE_FILES[name])
    rest = {"diff": [good], "gate": ["--against", good], "badge": [], "promote": []}[command]
    assert called(monkeypatch, command, bad, *rest) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {bad}:")
    assert said.err.count("\n") == 1
    assert said.err.rstrip("\n").isprintable()


def test_what_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    for name, words in {
        "NaN": "key 'wall_s': Input should be a finite number",
        "Infinity": "key 'wall_s': Input should be a finite number",
        "an overflow": "key 'wall_s': Input should be a finite number",
        "NaN deep in a detail": "NaN is no JSON number",
        "a key twice": "key 'outcome' is there twice",
        "a key twice in a detail": "key 'b' is there twice",
    }.items():
        bad.write_bytes(HOSTILE_FILES[name])
        assert called(monkeypatch, "badge", bad) == 2
        assert f"bad.jsonl:2: {words}; right form: results.schema.json" in capsys.readouterr().err, name


def test_a_loop_of_links_is_2_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, good: Path
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for arguments in (
        ["gate", good, "--against", good, "--policy", loop],
        ["promote", good, "--policy", loop],
        ["--matrix", loop, "explain", "tp"],
        ["--matrix", loop, "badge", good],
        ["table", good, "--into", loop],
        ["diff", good, good, "--into", loop],
    ):
        assert called(monkeypatch, *arguments) == 2, arguments
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert f"{loop}: " in said.err
        assert "Too many levels of symbolic links" in said.err


def test_a_loop_of_links_as_the_rows_of_a_run_is_2_and_one_line(tmp_path: Path) -> None:
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    command = [sys.executable, "-m", "pytest", "conformance", "--matrix", str(loop), "--reports", str(tmp_path / "reports")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    said = done.stdout + done.stderr
    assert said.count(f"{loop}: cannot be read: Too many levels of symbolic links") == 1
    assert "INTERNALERROR" not in said
    assert "Traceback" not in said
    assert not (tmp_path / "reports").exists()


PLACES = "<!-- table: written by python -m conformance table -->\n<!-- end of table -->\n"
PLACES += "<!-- upgrade: written by python -m conformance diff -->\n<!-- end of upgrade -->\n"


@pytest.mark.parametrize("command", ["table", "diff"])
def test_into_wants_utf8_and_writes_all_or_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, good: Path, command: str
) -> None:
    into = tmp_path / "pages" / "README.md"
    into.parent.mkdir()
    sides = [good] if command == "table" else [good, good]
    before = b"caf\xe9\r\n" + PLACES.encode()
    into.write_bytes(before)
    assert called(monkeypatch, command, *sides, "--into", into) == 2
    assert capsys.readouterr().err == f"error: {into}: not UTF-8; right form: a Markdown file in UTF-8\n"
    assert into.read_bytes() == before

    into.write_bytes("café\r\n".encode() + PLACES.encode())
    into.chmod(0o640)
    whole = into.read_bytes()
    with monkeypatch.context() as broken:
        broken.setattr("conformance.replace.os.replace", lambda *_paths: os.open(into / "x", 0))
        assert called(broken, command, *sides, "--into", into) == 2
    assert capsys.readouterr().err == f"error: {into}: cannot be written: Not a directory\n"
    assert into.read_bytes() == whole, "the old one, whole"
    assert called(monkeypatch, command, *sides, "--into", into) == 0
    assert into.read_bytes().startswith("café\r\n<!-- table".encode())
    assert len(into.read_bytes()) > len(whole)
    assert into.stat().st_mode & 0o777 == 0o640
    assert list(into.parent.iterdir()) == [into]


def test_into_a_link_writes_the_file_that_it_leads_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, good: Path) -> None:
    page, link = tmp_path / "page.md", tmp_path / "link.md"
    page.write_text(PLACES)
    link.symlink_to(page)
    assert called(monkeypatch, "table", good, "--into", link) == 0
    assert link.is_symlink()
    assert "| row | keys |" in page.read_text(encoding="utf-8")


def test_the_schemas_have_a_command_like_the_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = importlib.import_module("conformance.schema.__main__")
    for arguments, code in [(["--help"], 0), (["extra"], 2), (["--loud"], 2)]:
        monkeypatch.setattr(command, "texts", lambda: pytest.fail("it wrote"))
        monkeypatch.setattr(sys, "argv", ["schema", *arguments])
        assert __main__.run(command.write_schemas, "conformance.schema") == code
        said = capsys.readouterr()
        assert ("Write the published JSON schemas" in said.out) == (code == 0)
        assert said.err.count("\n") == (code == 2)


def test_the_schemas_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = importlib.import_module("conformance.schema.__main__")
    monkeypatch.setattr(command, "DIRECTORY", tmp_path)
    monkeypatch.setattr(sys, "argv", ["schema"])
    assert __main__.run(command.write_schemas, "conformance.schema") == 0
    assert {path.name for path in tmp_path.iterdir()} == set(command.texts())
    monkeypatch.setattr(command, "DIRECTORY", tmp_path / "none")
    assert __main__.run(command.write_schemas, "conformance.schema") == 2


def test_paths_in_results_are_not_followed(tmp_path: Path, good: Path) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    stack = tuple(replace(p, path=str(trap / "never.py")) for p in GOOD.header.stack)
    (trap / "never.py").write_text("raise SystemExit('imported')")
    os.utime(trap / "never.py", (1, 1))
    other = write(result_set(stack=stack), tmp_path / "other")
    before = (trap / "never.py").stat().st_atime
    done = run("diff", good, other)
    assert done.returncode == 0
    assert "imported" not in done.stdout + done.stderr
    assert (trap / "never.py").stat().st_atime == before


def test_a_set_without_checks_is_nothing_to_be_green_about(tmp_path: Path, good: Path) -> None:
    def empty(results: ResultSet) -> ResultSet:
        assert results.footer is not None
        return replace(results, checks=(), footer=replace(results.footer, checks=0))

    done = run("gate", write(empty(GOOD), tmp_path / "empty"), "--against", good)
    assert done.returncode == 1
    assert "gone" in done.stdout


def test_the_console_script_is_this_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    entry = importlib.metadata.EntryPoint("conformance", project["scripts"]["conformance"], "console_scripts")
    assert entry.load() is __main__.run


def test_run_wants_a_stack_that_there_is_and_that_is_installed() -> None:
    for name in ("suite", "nope", "verl070-mcore012"):
        done = run("run", "--stack", name)
        assert (done.returncode, done.stderr.count("\n"), done.stdout) == (2, 1, ""), done
        assert f"--stack {name}: " in done.stderr
