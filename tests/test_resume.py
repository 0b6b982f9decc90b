"""Taking up an interrupted run: nothing is run twice, nothing is lost, and another stack's records are not mixed in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_plugin import one_line, run
from test_results import CHECK, HEADER

from conformance.errors import UsageFault
from conformance.results import FILE_NAME, Package, ResultsWriter, read_results
from conformance.resume import load_earlier

SWIGLU = ("--row", "swiglu", "--backend", "plain")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that came to its end."""
    reports = tmp_path_factory.mktemp("whole")
    done = run(*SWIGLU, "--reports", str(reports))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--resume" not in done.stdout, "there is nothing to take up"
    return next((reports / "runs").iterdir())


@pytest.fixture
def interrupted(whole: Path, tmp_path: Path) -> Path:
    """That run, killed while it wrote its sixth line; the first check is marked, and the second was our own failure."""
    lines = (whole / FILE_NAME).read_text(encoding="utf-8").splitlines(keepends=True)
    first, second = json.loads(lines[1]), json.loads(lines[2])
    lines[1] = json.dumps(first | {"summary": "as the interrupted run found it"}) + "\n"
    lines[2] = json.dumps(second | {"outcome": "error", "summary": "the disk was full"}) + "\n"
    directory = tmp_path / "runs" / "killed"
    directory.mkdir(parents=True)
    (directory / FILE_NAME).write_text("".join(lines[:5]) + lines[5][:20], encoding="utf-8")
    return directory


@pytest.mark.stack
@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_only_what_is_missing_runs(interrupted: Path, whole: Path, workers: tuple[str, ...]) -> None:
    before = (interrupted / FILE_NAME).read_bytes()
    done = run(*SWIGLU, *workers, "--reports", str(interrupted.parents[1]), "--resume", str(interrupted))
    assert done.returncode == 0, done.stdout + done.stderr
    directory = next(path for path in interrupted.parent.iterdir() if path != interrupted)
    results, once = read_results(directory), read_results(whole)
    assert results.complete
    # What the test was given, not what the file was: the first line of progress is of the marked record.
    assert ": pass - as the interrupted run found it" in done.stdout
    assert {record.name for record in results.checks} == {record.name for record in once.checks}
    assert results.checks[0].summary == "as the interrupted run found it"
    assert results.header.started == once.header.started, "some of its records are as old as that"
    by_name = {record.name: record for record in results.checks}
    assert by_name[once.checks[1].name].outcome == once.checks[1].outcome, "our own failure was tried again"
    assert by_name[once.checks[2].name].wall_s == once.checks[2].wall_s, "and the others were not"
    assert (interrupted / FILE_NAME).read_bytes() == before


@pytest.mark.stack
def test_other_rows_are_told_before_anything_is_imported(interrupted: Path) -> None:
    done = run("--row", "tp", "--backend", "plain", "--reports", str(interrupted.parents[1]), "--resume", str(interrupted))
    one_line(done, "--resume", "was", "swiglu", "there and is tp now")
    assert "importing the stack" not in done.stdout


def test_a_checkout_with_changes_is_never_taken_up(tmp_path: Path) -> None:
    header = replace(HEADER, stack=(Package("mindspeed", "core_r0.16.0", None, "e4772499f7eb+changes"),))
    with ResultsWriter(tmp_path / "run", header) as writer:
        writer.add(CHECK)
    with pytest.raises(UsageFault, match="mindspeed's checkout had changes of its own"):
        load_earlier(tmp_path / "run").require_same(header)


@pytest.mark.stack
def test_another_stack(interrupted: Path) -> None:
    file = interrupted / FILE_NAME
    file.write_text(file.read_text(encoding="utf-8").replace('"version": "0.9.1"', '"version": "0.8.0"', 1), encoding="utf-8")
    done = run(*SWIGLU, "--reports", str(interrupted.parents[1]), "--resume", str(interrupted))
    one_line(done, "--resume", "stack was verl 0.8.0", "is verl 0.9.1", "right form")
    assert [path.name for path in interrupted.parent.iterdir()] == ["killed"], "no second directory stays"


@pytest.mark.stack
def test_a_run_that_came_to_its_end(whole: Path) -> None:
    one_line(run(*SWIGLU, "--resume", str(whole)), "--resume", "came to its end", "right form")


def test_no_run_at_all(tmp_path: Path) -> None:
    one_line(run(*SWIGLU, "--resume", str(tmp_path / "nothing")), "nothing", "cannot be read")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": ("tp",)}, "rows was tp, ep there and is tp now"),
        ({"matrix_sha256": "1" * 64}, "matrix_sha256 was 000"),
        ({"backend": "mindspeed"}, "backend was plain there and is mindspeed now"),
        ({"device": "npu"}, "device was emulated there and is npu now"),
        ({"route": "worker"}, "route was engine there and is worker now"),
        ({"stack": (Package("verl", "0.9.1", "elsewhere"), *HEADER.stack[1:])}, "is verl 0.9.1 (elsewhere) now"),
        ({"complete_selection": True}, "complete_selection was False there"),
        ({"untested": ("torch 2.14",)}, "untested was none there and is torch 2.14 now"),
    ],
)
def test_what_makes_it_another_run(change: dict[str, object], words: str, tmp_path: Path) -> None:
    with ResultsWriter(tmp_path / "run", HEADER) as writer:
        writer.add(CHECK)
    earlier = load_earlier(tmp_path / "run")
    earlier.require_same(replace(HEADER, started="2026-09-02T00:00:00Z"))
    with pytest.raises(UsageFault, match="right form") as raised:
        earlier.require_same(replace(HEADER, **change))
    assert words in str(raised.value)
