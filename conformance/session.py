"""One pytest process of the suite: what it selects, checks before the run, the results as they come, the table at the end.

Policy lives elsewhere: what a check concludes in `checks`, what is expected in `known`, what a page says in `report`.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from conformance import ci, known, matrix, models, releases, stack
from conformance.backend import BackendSpec, Imported
from conformance.checks import STOPS
from conformance.errors import UsageFault
from conformance.operators import FAMILIES, Family
from conformance.publish import publish, published, write_tables
from conformance.results import (
    PRECISIONS,
    CheckRecord,
    Header,
    OperatorRecord,
    Package,
    ResultSet,
    ResultsWriter,
    Route,
    line_adapter,
    new_run_directory,
    read_results,
)
from conformance.resume import SELECTION, load_earlier
from conformance.whole import is_narrowed, is_whole, total_checks

USAGE = 2
#: On a test report: the check's record as JSON. Unknown attributes of a report travel to xdist's controller.
_ATTRIBUTE = "conformance_record"

Collected = tuple[CheckRecord | OperatorRecord, Imported]
RECORD = pytest.StashKey[Collected]()
SESSION = pytest.StashKey["Session"]()


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turn a UsageFault into pytest's exit with one line and code 2."""
    try:
        yield
    except UsageFault as fault:
        pytest.exit(str(fault), returncode=USAGE)


class Session:
    """One pytest process: in a worker it runs checks, in the controller (or alone) it also writes what they come to."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.matrix_file: Path = config.getoption("matrix")
        self.matrix = matrix.load_matrix(self.matrix_file)
        #: Rows of somebody else's: what is said of them stays in the run's directory.
        self.is_own_matrix = self.matrix_file.resolve() != matrix.MATRIX
        self.known = known.load_beside(self.matrix_file, self.matrix)
        self.rows = self._selected(config.getoption("row"))
        for row in self.rows:
            models.load(row.model)
        self.is_worker = hasattr(config, "workerinput")
        self.backend = self._backend()
        self.route = self._route(config.getoption("--route"))
        self.began = time.monotonic()
        self.directory: Path | None = None
        self.writer: ResultsWriter | None = None
        self.header: Header | None = None
        resumed: Path | None = config.getoption("resume")
        self.earlier = load_earlier(resumed) if resumed else None
        self.matched: list[known.KnownIssue] = []
        self.stale: tuple[known.KnownIssue, ...] = ()
        self.published: Path | None = None
        self.summary_fault: str | None = None
        self.ended = False
        #: Why no table is made of this run: its baseline is wrong.
        self.stopped: str | None = None
        self.started = ""
        self.done = 0
        if self.earlier is not None:
            self.earlier.require_same(header_of(self, Imported(self.earlier.header.device, ())), SELECTION)
        if not self.is_worker and not config.getoption("collectonly"):
            stack.require()
            self._check_core()
            self.started = self.earlier.header.started if self.earlier else _now()
            self.directory = new_run_directory(config.getoption("reports") / "runs", self.started)

    def _selected(self, ids: list[str]) -> tuple[matrix.Row, ...]:
        unknown = [i for i in ids if i not in set(self.matrix.ids())]
        if unknown:
            raise UsageFault(f"--row {unknown[0]}: no such row; right form: one of {', '.join(self.matrix.ids())}")
        return tuple(row for row in self.matrix.rows if not ids or row.id in ids)

    def _backend(self) -> BackendSpec:
        wanted = self.config.getoption("backend")
        found = stack.find_mindspeed() if wanted != "plain" else None
        if wanted == "mindspeed" and found is None:
            raise UsageFault(
                "--backend mindspeed: no MindSpeed found; right form: MINDSPEED_HOME=<a clone of Ascend/MindSpeed>, "
                "or an installed mindspeed"
            )
        if self.config.getoption("npu") == "real" and self.config.getoption("numprocesses", None):
            raise UsageFault("--npu real -n: processes would share the devices; right form: without -n")
        return BackendSpec("mindspeed" if found else "plain", self.config.getoption("npu"), found)

    def _route(self, wanted: Route | None) -> Route:
        """The wanted route, or the release's default; UsageFault for one that the installed verl has not."""
        release = releases.current()
        if wanted is not None and wanted not in release.routes:
            raise UsageFault(
                f"--route {wanted}: the installed verl has no such way; right form: one of {', '.join(release.routes)}"
            )
        return wanted or release.default_route

    def _check_core(self) -> None:
        mismatch = stack.core_mismatch(self.backend.mindspeed) if self.backend.mindspeed else None
        if mismatch and not self.config.getoption("force"):
            raise UsageFault(mismatch)

    # What pytest calls, in the order of a run.

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.pytest_session = session
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # a line per check says more than a file name and dots

    @property
    def families(self) -> frozenset[Family]:
        """The families of operators that the run is to test."""
        if len(self.rows) == len(self.matrix.rows) and not self.is_own_matrix:
            return frozenset(FAMILIES)
        return frozenset(family for row in self.rows for family in row.operators)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """With `--row` or another matrix, only the operators that a chosen row rests on."""
        left_out = [item for item in items if family_of(item) not in {None, *self.families}]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    def pytest_report_header(self) -> list[str]:
        source = self.backend.mindspeed
        where = f"branch {source.branch}, commit {source.commit}" if source else "Transformer Engine in plain torch"
        packages = stack.installed(source)
        return [
            f"conformance: {len(self.rows)} rows, backend {self.backend.name} ({where}), npu {self.backend.npu}",
            f"conformance: route {self.route}",
            *(f"conformance: untested combination: {line}" for line in stack.untested(packages)),
            *(f"conformance: deviation from the documented stack: {line}" for line in stack.deviations(packages)),
        ]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, None]:
        """Send the record along with the report of the test's call; it crosses to xdist's controller as JSON."""
        outcome = yield
        report: pytest.TestReport = outcome.get_result()
        found = item.stash.get(RECORD, None)
        if report.when == "call" and found is not None:
            record, imported = found
            text = json.dumps({"record": asdict(record), "imported": asdict(imported)}, default=str)
            setattr(report, _ATTRIBUTE, text)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots: `pytest_runtest_logreport` writes a line per check."""
        if getattr(report, _ATTRIBUTE, None) is None:
            return None
        category = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        return category, "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = getattr(report, _ATTRIBUTE, None)
        if self.is_worker or text is None or self.directory is None:
            return
        data = json.loads(text)
        record = line_adapter().validate_json(json.dumps(data["record"]))
        assert isinstance(record, CheckRecord | OperatorRecord)
        imported = Imported(data["imported"]["device"], tuple(Package(**p) for p in data["imported"]["packages"]))
        with one_line():
            self._write(record, imported)
        self._progress(record)
        if isinstance(record, CheckRecord) and STOPS in record.detail:
            self._stop(record.summary)

    def _stop(self, why: str) -> None:
        """End the run after the test that runs now; under xdist its controller does that, who has a plugin of this name."""
        self.stopped = why
        distributed: Any = self.config.pluginmanager.get_plugin("dsession")
        (distributed or self.pytest_session).shouldstop = why

    def _write(self, record: CheckRecord | OperatorRecord, imported: Imported) -> None:
        if self.writer is None or self.header is None:
            assert self.directory is not None
            self.header = header_of(self, imported)
            self.writer = ResultsWriter(self.directory, self.header)
            for earlier in self.earlier.checks.values() if self.earlier else ():
                self.writer.add(earlier)  # all at once: when this run is interrupted, too, nothing is lost
        if isinstance(record, OperatorRecord):
            self.writer.add(record)
            return
        if self.recorded(record.name) is None:
            self.writer.add(record)
        entry = known.match(self.known, record, self.header)
        if entry is not None:
            self.matched.append(entry)

    def require_right_stack(self, imported: Imported) -> None:
        """UsageFault when, now that the stack is known, the run cannot be what the command line and the files say."""
        header = header_of(self, imported)
        known.require_one_each(self.known, header)
        if self.earlier is not None:
            self.earlier.require_same(header)

    def recorded(self, name: tuple[str, str, str, str, str | None]) -> CheckRecord | None:
        """The record that the interrupted run has of a check."""
        return self.earlier.checks.get(name) if self.earlier else None

    def _progress(self, record: CheckRecord | OperatorRecord) -> None:
        if isinstance(record, OperatorRecord):
            self.say(f"[operator {time.monotonic() - self.began:4.0f}s] {record.family}: {record.outcome} - {record.summary}")
            return
        self.done += 1
        total = max(total_checks(self.rows), self.done) if self.config.option.keyword == "" else None
        of = f"/{total}" if total else ""
        precision = f" {record.precision}" if record.precision else ""
        variant = "" if record.variant == "documented" else f" ({record.variant})"
        line = (
            f"[{self.done}{of} {time.monotonic() - self.began:4.0f}s] {record.row}{variant} {record.role} "
            f"{record.check}{precision}: {record.outcome} - {record.summary}"
        )
        self.say(line)

    def say(self, line: str) -> None:
        """A line of progress of its own, cut to the width of a terminal."""
        reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line(line[: max(80, reporter._tw.fullwidth - 1)] if reporter.isatty else line)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.is_worker or self.directory is None:
            return
        if self.writer is None:
            self.directory.rmdir()  # nothing ran
            return
        # With -x pytest ends with the code of failed tests; xdist says so by shouldstop.
        cut_short = bool(session.shouldfail or session.shouldstop)
        ended_well = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not cut_short
        with one_line():
            results_so_far = read_results(self.directory)
            # What was asked for everything and lacks a part is not complete.
            lacking = results_so_far.header.complete_selection and not is_whole(results_so_far, self.rows, self.families)
            if ended_well and not lacking:
                self.writer.finish(_now(), round(time.monotonic() - self.began, 1))
            results = read_results(self.directory)
            self.ended = results.complete
            if self.stopped is None:
                write_tables(results, self.matrix.rows, self.directory)
            previous = None
            if self._is_to_be_published(results):
                previous = published(self.config.getoption("reports"), results)
                self.published = publish(self.directory, self.config.getoption("reports"), results)
        if results.complete and results.header.complete_selection:
            self.stale = known.unused(self.known, self.matched, results.header)
        if (self.stale and session.exitstatus == pytest.ExitCode.OK) or self.stopped is not None:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        path = ci.summary_path()
        if path is not None:
            rows = self.matrix.rows
            whole = ci.stopped_summary(self.stopped) if self.stopped else None
            self.summary_fault = ci.append(path, whole or ci.summary(results, rows, self.known, self.stale, previous))

    def _is_to_be_published(self, results: ResultSet) -> bool:
        """Whole, of the suite's own rows, and without a failure of our own: that says nothing about the stack."""
        errors = any(record.outcome == "error" for record in results.checks)
        return results.complete and results.header.complete_selection and not self.is_own_matrix and not errors

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.directory is None or self.writer is None:
            return
        for entry in self.stale:
            line = f"{entry.row} {entry.variant} {entry.check}: {entry.reason}"
            terminalreporter.write_line(f"known_issues.yaml: matches no check of this run: {line}")
        if self.summary_fault:
            terminalreporter.write_line(self.summary_fault)
        where = self.published or self.directory
        if self.stopped is not None:
            terminalreporter.write_line(f"conformance: no table, for nothing can be judged: {self.stopped}")
            return
        terminalreporter.write_line(f"conformance: results and support table in {_relative(where)}")
        if not self.ended:
            terminalreporter.write_line(f"conformance: not run to its end; --resume {_relative(where)} takes it up")


def family_of(item: pytest.Item) -> Family | None:
    """The family of operators that a test is of; None for a test of another kind."""
    mark = item.get_closest_marker("operator")
    return None if mark is None else mark.args[0]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def header_of(session: Session, imported: Imported) -> Header:
    """The run's header; what it says of the stack is what the rank server imported."""
    return Header(
        started=session.started,
        device="npu" if imported.device == "npu" else "emulated",
        backend=session.backend.name,
        precisions=PRECISIONS,
        stack=imported.packages,
        matrix_sha256=hashlib.sha256(session.matrix_file.read_bytes()).hexdigest(),
        rows=tuple(row.id for row in session.rows),
        untested=stack.untested(imported.packages),
        deviations=stack.deviations(imported.packages),
        route=session.route,
        complete_selection=len(session.rows) == len(session.matrix.rows) and not is_narrowed(session.config),
    )


def _relative(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
