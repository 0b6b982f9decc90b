"""From a family to the table: what is drawn, what is kept, what a failure prints, and what a run selects and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from test_plugin import ROOT, copy_of_the_project, run
from test_results import CHECK, HEADER

from conformance.errors import UsageFault
from conformance.matrix import load_matrix
from conformance.operators import COLLECTIVE, FAMILIES
from conformance.operators.profiles import CI, NIGHTLY, OperatorSpec, Profile, chosen, rank_counts
from conformance.report.markdown import render
from conformance.report.page import render_page
from conformance.report.short import short_table
from conformance.results import Footer, OperatorRecord, ResultSet, ResultsWriter, read_results

RECORD = OperatorRecord("swiglu", "pass", "fine", 155, 1.25, "emulated", None, 1.5)
MATRIX = load_matrix()


# Results.


def write(directory: Path, *records: Any) -> Path:
    with ResultsWriter(directory, HEADER) as writer:
        for record in records:
            writer.add(record)
        writer.finish("2026-09-01T00:01:00Z", 60.0)
    return writer.path


def test_operators_are_read_back_and_counted_apart(tmp_path: Path) -> None:
    wrong = replace(RECORD, family="rotary", outcome="fail", worst_ratio=None, falsifying="def test() -> None: ...\n")
    results = read_results(write(tmp_path / "run", RECORD, CHECK, wrong))
    assert results.operators == (RECORD, wrong)
    assert results.checks == (CHECK,)
    assert results.footer == Footer(checks=1, wall_s=60.0, finished="2026-09-01T00:01:00Z", operators=2)


def test_a_family_twice_or_lost_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match=r":3: a second record of swiglu"):
        read_results(write(tmp_path / "twice", RECORD, RECORD))
    path = write(tmp_path / "lost", RECORD, CHECK)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:1] + lines[2:]))
    with pytest.raises(UsageFault, match="counts 1 operators, there are 0"):
        read_results(path)


def test_results_from_before_there_were_operators_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "old", CHECK)
    lines = path.read_text().splitlines()
    footer = json.loads(lines[-1])
    del footer["operators"]
    path.write_text("\n".join([*lines[:-1], json.dumps(footer)]) + "\n")
    assert read_results(path).operators == ()
    assert read_results(path).complete


# The table.


def results(*operators: OperatorRecord) -> ResultSet:
    header = replace(HEADER, rows=tuple(MATRIX.ids()))
    return ResultSet(header, (), Footer(checks=0, wall_s=1.0, finished="x", operators=len(operators)), operators)


@pytest.mark.parametrize(
    ("language", "cell"), [("en", "155 cases, worst error 1.2× the expected rounding error, emulated NPU"), ("zh", "155 个用例")]
)
def test_the_rows_that_rest_on_operators_have_a_column(language: Any, cell: str) -> None:
    page = render(results(RECORD), MATRIX.rows, language)
    lines = {line.split(" | ")[0].lstrip("| "): line for line in page.splitlines() if line.startswith("|")}
    assert f"`swiglu` ✅ {cell}" in lines["swiglu"]
    assert "✅" not in lines["↳ swiglu (effective)"], "once per row"
    assert lines["rms norm"].count("`rms_norm` ⏸") == 1
    assert lines["TP"].rstrip(" |").endswith("0.16.0"), "a row without operators says nothing"


def test_the_html_page_lists_the_families_and_escapes_what_they_say() -> None:
    wrong = replace(RECORD, family="rotary", outcome="fail", worst_ratio=None, summary="<script>alert(1)</script>")
    shown = results(RECORD, wrong)
    page = render_page(shown, [shown], MATRIX.rows)
    assert "<code>swiglu</code>" in page
    assert "1.2×" in page
    assert "<bdi>&lt;script&gt;alert(1)&lt;/script&gt;</bdi>" in page
    assert 'id="operators"' not in render_page(results(), [results()], MATRIX.rows)


def test_a_failing_family_shows_what_fails() -> None:
    page = render(results(replace(RECORD, outcome="fail", summary="named case odd: output | wrong")), MATRIX.rows, "en")
    assert r"`swiglu` ❌ fail: named case odd: output \| wrong" in page
    assert "❌ 155 cases" in short_table(results(replace(RECORD, outcome="fail")), MATRIX.rows)


def test_the_short_table_has_the_column_when_there_is_something_in_it() -> None:
    assert "✅ 155 cases, worst error 1.2×" in short_table(results(RECORD), MATRIX.rows)
    assert "| operators |" not in short_table(results(), MATRIX.rows)


def test_a_family_that_is_none_is_told_with_its_line(tmp_path: Path) -> None:
    text = (ROOT / "matrix.yaml").read_text(encoding="utf-8").replace("operators: [swiglu]", "operators: [swigloo]")
    (tmp_path / "matrix.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageFault, match=r"matrix.yaml:\d+.*operators.*swigloo.*right form: one of 'fusion_attention'"):
        load_matrix(tmp_path / "matrix.yaml")


# Profiles and selection.


def test_profiles() -> None:
    assert chosen(None) == chosen("ci") == CI
    assert CI.derandomize
    assert not CI.database
    assert chosen("nightly") == NIGHTLY
    assert NIGHTLY.max_examples > 10 * CI.max_examples
    assert chosen("default").max_examples == 100
    assert [rank_counts(f) for f in FAMILIES] == [(2, 4) if f in COLLECTIVE else (1,) for f in FAMILIES]


def operators_of(*arguments: str) -> set[str]:
    """Families whose tests are collected."""
    done = run("--collect-only", "-q", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    start = "conformance/test_operators.py::test_"
    return {line.removeprefix(start) for line in done.stdout.splitlines() if line.startswith(start)}


def test_which_operators_a_selection_runs() -> None:
    assert operators_of() == set(FAMILIES), "one test per family"
    assert operators_of("-k", "ep") == set()
    assert operators_of("--row", "swiglu", "--row", "permute") == {"swiglu", "moe_permute", "moe_unpermute"}
    assert operators_of("--row", "tp") == set()
    assert operators_of("--hypothesis-profile=nightly", "-k", "rotary") == {"rotary"}


def test_the_database_of_cases_is_not_in_git() -> None:
    assert ".hypothesis/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.stack
def test_a_wrong_operator_turns_the_run_red_with_a_test_to_paste(tmp_path: Path) -> None:
    copy_of_the_project(tmp_path)
    norm = tmp_path / "conformance/npu/site/torch_npu/ops/norm.py"
    text = norm.read_text()
    assert text.count(" + epsilon)") == 1
    norm.write_text(text.replace(" + epsilon)", ")"))
    arguments = ("--backend", "plain", "--npu", "emulated", "-k", "rms_norm or swiglu", "--hypothesis-profile=ci")
    done = run(*arguments, "--deselect", "conformance/test_matrix.py", "--reports", str(tmp_path / "reports"), cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fail: named case small_input: output, rstd" in done.stdout
    assert "    replay('rms_norm', RmsNormCase(" in done.stdout
    assert "swiglu: pass - " in done.stdout
    (directory,) = (tmp_path / "reports/runs").iterdir()
    found = {r.family: r for r in read_results(directory).operators}
    assert found["rms_norm"].outcome == "fail"
    assert "replay('rms_norm'" in (found["rms_norm"].falsifying or "")
    assert (found["swiglu"].outcome, found["swiglu"].device, found["swiglu"].falsifying) == ("pass", "emulated", None)
    assert found["swiglu"].cases > CI.max_examples
    # What was printed, pasted: it fails as it stands, and passes once the fault is gone.
    (tmp_path / "test_pasted.py").write_text(found["rms_norm"].falsifying or "")
    pasted = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path / "test_pasted.py"),
        "--rootdir",
        str(tmp_path),
    ]
    red = subprocess.run(pasted, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert red.returncode == 1, red.stdout + red.stderr
    assert "times the expected rounding error" in red.stdout
    norm.write_text(text)
    green = subprocess.run(pasted, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert green.returncode == 0, green.stdout + green.stderr


# Exploring.

#: Prints a hash of each family's cases. The first argument is run before, the second is hypothesis's own directory.
HASH = """
import hashlib, sys
exec(sys.argv[1])
from conformance.operators import FAMILIES
from conformance.operators.explore import explore
from conformance.operators.profiles import CI
from conformance.operators.tolerance import Worst

for family in FAMILIES:
    cases = []
    explore(family, CI, lambda case: cases.append(case) or Worst(0.0, "nothing"), sys.argv[2])
    print(family, len(cases), hashlib.sha256(repr(cases).encode()).hexdigest())
"""


@pytest.mark.stack
class TestExploring:
    def explore(self, check: Any, home: Path, *, database: bool = False, derandomize: bool = True) -> Any:
        from conformance.operators.explore import explore

        return explore("swiglu", Profile(80, derandomize, database), check, str(home))

    def fine(self, _case: Any) -> Any:
        from conformance.operators.tolerance import Worst

        return Worst(0.5, "output")

    def test_the_same_cases_in_every_run(self, tmp_path: Path) -> None:
        runs: list[list[Any]] = [[], []]
        for cases in runs:
            self.explore(lambda case, cases=cases: cases.append(case) or self.fine(case), tmp_path)
        assert runs[0] == runs[1]
        assert len(set(runs[0])) > 60

    def test_the_same_cases_whatever_modules_are_loaded(self, tmp_path: Path) -> None:
        """hypothesis would draw the numbers that a loaded module has in it more often than others."""
        (tmp_path / "extra.py").write_text("NUMBERS = [" + ", ".join(str(n) for n in range(3, 10_000, 7)) + "]\n")
        hashed = [
            subprocess.run(
                [sys.executable, "-c", HASH, first, str(tmp_path)],
                cwd=ROOT,
                env=dict(os.environ, PYTHONPATH=f"{ROOT}:{tmp_path}"),
                capture_output=True,
                text=True,
                timeout=120,
            )
            for first in ("", "import extra", "import extra, conformance.__main__")
        ]
        assert all(done.returncode == 0 for done in hashed), hashed
        assert hashed[0].stdout.count("\n") == len(FAMILIES)
        assert hashed[0].stdout == hashed[1].stdout == hashed[2].stdout

    @pytest.mark.parametrize("by_default", [False, True])  # hypothesis's own default is True where the variable CI is set
    def test_other_cases_when_they_are_not_derandomized(
        self, by_default: bool, tmp_path: Path, request: pytest.FixtureRequest
    ) -> None:
        request.addfinalizer(partial(settings.load_profile, settings.get_current_profile_name()))
        settings.register_profile("this machine", derandomize=by_default)
        settings.load_profile("this machine")
        runs: list[list[Any]] = [[], []]
        for cases in runs:
            self.explore(lambda case, cases=cases: cases.append(case) or self.fine(case), tmp_path, derandomize=False)
        assert runs[0] != runs[1]

    def test_a_failure_shrinks_and_is_kept_for_the_next_run(self, tmp_path: Path) -> None:
        seen: list[Any] = []

        def picky(case: Any) -> Any:
            seen.append(case)
            if case.seed > 20:  # no named case has a seed
                raise ValueError("a large seed")
            return self.fine(case)

        found = self.explore(picky, tmp_path, database=True, derandomize=False)
        assert found.where == "drawn case: ValueError: a large seed"
        assert "seed=21)" in found.falsifying, "shrunk"
        assert list((tmp_path / "examples").rglob("*"))
        first = len(seen)
        self.explore(picky, tmp_path, database=True, derandomize=False)
        drawn = [case for case in seen[first:] if case.seed]
        assert drawn[0].seed == 21, "the next run begins with it"

    def test_nothing_is_kept_without_a_database(self, tmp_path: Path) -> None:
        def wrong(_case: Any) -> Any:
            raise ValueError("always")

        assert self.explore(wrong, tmp_path).where == "named case last: ValueError: always"
        assert not (tmp_path / "examples").exists()

    def test_every_family_has_named_cases_and_all_of_them_print_as_code(self) -> None:
        from conformance.operators.catalogue import CATALOGUE
        from conformance.operators.explore import pasteable

        assert set(CATALOGUE) == set(FAMILIES)
        for family, entry in CATALOGUE.items():
            assert len(entry.named) >= 4
            for case in entry.named.values():
                namespace: dict[str, Any] = {}
                exec(f"from {type(case).__module__} import {type(case).__name__}\ncase = {case!r}", namespace)
                assert namespace["case"] == case
                compile(pasteable(family, case), family, "exec")

    def test_without_kernels_their_cases_neither_run_nor_count(self, tmp_path: Path) -> None:
        from conformance.operators.explore import explore

        cases: list[Any] = []
        check = lambda case: cases.append(case) or self.fine(case)  # noqa: E731
        found = explore("rotary", Profile(40, True), check, str(tmp_path), kernels=False)
        assert found.cases == len(cases)
        assert {case.entry for case in cases} == {"operator"}
        explore("rotary", Profile(40, True), check, str(tmp_path))
        assert {case.entry for case in cases} == {"operator", "kernel"}

    def test_after_ranks_were_lost_nothing_runs_and_the_case_is_told(self, tmp_path: Path) -> None:
        from conformance.operators.tolerance import Lost

        seen: list[Any] = []

        def lost(case: Any) -> Any:
            seen.append(case)
            if case.seed > 20:
                raise Lost("rank 1 of 2: gone")
            return self.fine(case)

        found = self.explore(lost, tmp_path)
        assert found.where == "drawn case: rank 1 of 2: gone"
        assert repr(seen[-1]) in found.falsifying
        assert sum(case.seed > 20 for case in seen) == 1, "no shrinking"

    def test_unlike_failures_of_ranks_mean_that_they_are_lost(self) -> None:
        from conformance.operators.job import _Fault, _together
        from conformance.operators.tolerance import Lost, Worst, Wrong

        fine, no, wrong = Worst(1.0, "x"), _Fault("no", raised=True), _Fault("output", raised=False)
        assert _together([fine, Worst(2.0, "y")]).name == "y"
        for answers, kind, told in (
            ([no, no], Wrong, "rank 0, 1 of 2: no"),
            ([fine, wrong], Wrong, "rank 1 of 2: output"),
            ([fine, no], Lost, "rank 1 of 2: no"),
            ([_Fault("waited", raised=True), no], Lost, "rank 0 of 2: waited; rank 1 of 2: no"),
        ):
            with pytest.raises(Wrong) as raised:
                _together(answers)
            assert type(raised.value) is kind
            assert str(raised.value) == told

    def test_a_job_that_does_not_come_back_is_a_crash(self) -> None:
        from conformance.operators.record import to_record
        from conformance.ranks import JobReport, RankReport

        stuck = RankReport(0, "stuck", None, None, None, None, "", "")
        report = JobReport("rotary on 1", "crash", (stuck,), 9.0, "deadline of 9 s passed; rank 0 stuck", 0)
        record = to_record("rotary", "emulated", [report])
        assert (record.outcome, record.cases, record.worst_ratio) == ("crash", 0, None)
        assert record.summary == "rotary on 1: deadline of 9 s passed; rank 0 stuck"

    def test_a_case_that_is_refused_fails_its_replay(self) -> None:
        from conformance.operators.elementwise import SwigluCase
        from conformance.operators.job import replay

        replay("swiglu", SwigluCase((3, 4), -1, "float32"))
        with pytest.raises(AssertionError, match="must be even"):
            replay("swiglu", SwigluCase((3, 5), -1, "float32"))

    def test_a_collective_case_replays_on_its_ranks(self) -> None:
        from conformance.operators.job import replay
        from conformance.operators.matmul import CollectiveCase

        replay("matmul_all_reduce", CollectiveCase(2, 3, 4, "float16", with_bias=True))

    def test_a_spec_has_time_for_its_cases(self) -> None:
        assert OperatorSpec("rotary", CI, "x").deadline_s < OperatorSpec("rotary", NIGHTLY, "x").deadline_s


def test_a_record_is_plain_data() -> None:
    assert asdict(RECORD)["kind"] == "operator"
