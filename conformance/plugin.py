"""The pytest wiring of the suite: options, checks before the run, results as they come, the table at the end.

Policy lives elsewhere: what a check concludes in `checks`, what is expected in `known`, what a page says in `report`.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from conformance import ci, known, matrix, models, npu, releases, stack
from conformance.backend import BackendSpec, Imported
from conformance.checks import cases_of, watched
from conformance.errors import UsageFault
from conformance.operators import FAMILIES, Family, profiles
from conformance.operators.record import run_family
from conformance.publish import publish, published, write_tables
from conformance.results import (
    PRECISIONS,
    ROUTES,
    Check,
    CheckRecord,
    Header,
    OperatorRecord,
    Package,
    ResultsWriter,
    Route,
    line_adapter,
    new_run_directory,
    read_results,
)
from conformance.runner import Case, Runner
from conformance.whole import is_narrowed, is_whole, total_checks

HERE = Path(__file__).resolve().parent
#: Of the checkout that this is; of an installed package, those of the directory where pytest runs.
REPORTS = matrix.ROOT / "reports" if matrix.MATRIX.is_file() else Path("reports")
USAGE = 2
#: Rank servers of one pytest process: a server takes a gigabyte, and cases have up to four ranks of their own.
MOST_LANES = 4
#: Tests of the matrix that run steps -> the check that they make.
_CHECKS: dict[str, Check] = {"test_engaged": "engaged", "test_parity": "parity"}
#: On a test report: the check's record as JSON. Unknown attributes of a report travel to xdist's controller.
_ATTRIBUTE = "conformance_record"

Collected = tuple[CheckRecord | OperatorRecord, Imported]
_RECORD = pytest.StashKey[Collected]()
_SESSION = pytest.StashKey["Session"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "verl + MindSpeed conformance")
    group.addoption("--matrix", type=Path, default=matrix.MATRIX, metavar="FILE", help="other rows than those of matrix.yaml")
    group.addoption("--row", action="append", default=[], metavar="ID", help="run this row only (repeatable)")
    group.addoption("--backend", choices=["auto", "plain", "mindspeed"], default="auto", help="default: MindSpeed if found")
    group.addoption("--npu", choices=["auto", "emulated", "real"], default="auto", help="default: a real NPU if found")
    group.addoption("--route", choices=ROUTES, default=None, help="way through verl; default: the installed release's users'")
    group.addoption("--force", action="store_true", help="run although megatron-core does not match the MindSpeed branch")
    group.addoption("--reports", type=Path, default=REPORTS, metavar="DIR", help="where results and tables go")


def pytest_cmdline_main(config: pytest.Config) -> None:
    # A row's checks share their runs, so they go to one worker.
    if getattr(config.option, "dist", None) == "no":
        config.option.dist = "loadgroup"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "operator(family): the family of operators that the test is of")
    profile = config.getoption("--hypothesis-profile", None)
    if profile:
        with one_line():
            profiles.register(profile)
    if not _is_wanted(config):
        return
    with one_line():
        session = Session(config)
    config.stash[_SESSION] = session
    config.pluginmanager.register(session, "conformance-session")


def _is_wanted(config: pytest.Config) -> bool:
    """Whether this invocation collects from `conformance/` at all."""
    names = [str(argument).split("::")[0] for argument in config.args]
    if config.option.pyargs and any(name.split(".")[0] == __package__ for name in names):
        return True
    return any((config.invocation_params.dir / name).resolve().is_relative_to(HERE) for name in names)


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
        #: Rows of somebody else's: what is said of them stays in the run's directory.
        self.is_own_matrix = self.matrix_file.resolve() != matrix.MATRIX
        self.matrix = matrix.load_matrix(self.matrix_file)
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
        self.matched: list[known.KnownIssue] = []
        self.seen: set[str] = set()
        self.stale: tuple[known.KnownIssue, ...] = ()
        self.published: Path | None = None
        self.summary_fault: str | None = None
        self.started = ""
        self.done = 0
        if not self.is_worker and not config.getoption("collectonly"):
            stack.require()
            self._check_core()
            self.started = _now()
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
        found = item.stash.get(_RECORD, None)
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

    def _write(self, record: CheckRecord | OperatorRecord, imported: Imported) -> None:
        if self.writer is None or self.header is None:
            assert self.directory is not None
            self.header = header_of(self, imported)
            self.writer = ResultsWriter(self.directory, self.header)
        self.writer.add(record)
        if isinstance(record, OperatorRecord):
            return
        self.seen.add(record.row)
        entry = known.match(self.known, record, self.header)
        if entry is not None:
            self.matched.append(entry)

    def _progress(self, record: CheckRecord | OperatorRecord) -> None:
        if isinstance(record, OperatorRecord):
            self._say(f"[operator {time.monotonic() - self.began:4.0f}s] {record.family}: {record.outcome} - {record.summary}")
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
        self._say(line)

    def _say(self, line: str) -> None:
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
            write_tables(results, self.matrix.rows, self.directory)
            previous = None
            if results.complete and results.header.complete_selection and not self.is_own_matrix:
                previous = published(self.config.getoption("reports"), results)
                self.published = publish(self.directory, self.config.getoption("reports"), results)
        if ended_well and self.seen == set(self.matrix.ids()):
            self.stale = known.unused(self.known, self.matched, results.header)
        if self.stale and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        path = ci.summary_path()
        if path is not None:
            self.summary_fault = ci.append(path, ci.summary(results, self.matrix.rows, self.known, self.stale, previous))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.directory is None or self.writer is None:
            return
        for entry in self.stale:
            line = f"{entry.row} {entry.variant} {entry.check}: {entry.reason}"
            terminalreporter.write_line(f"known_issues.yaml: matches no check of this run: {line}")
        if self.summary_fault:
            terminalreporter.write_line(self.summary_fault)
        where = self.published or self.directory
        terminalreporter.write_line(f"conformance: results and support table in {_relative(where)}")


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


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """The runner of this process, started: its rank servers have imported the stack.

    Without `-n`, a server for each core, which run ahead with the cases of the selected tests. A worker has one server, and
    does not know which tests it will be given; on hardware the ranks of two cases would share the devices.
    """
    session = request.config.stash[_SESSION]
    alone = session.is_worker or npu.may_be_real(session.backend.npu)
    lanes = 1 if alone else min(len(os.sched_getaffinity(0)), MOST_LANES)
    with Runner(session.backend, watched(session.rows, session.backend.name), lanes=lanes, route=session.route) as started:
        with one_line():
            started.start()
        if not session.is_worker:
            started.plan(case for item in request.session.items for case in _cases_of(item))
        yield started


def _cases_of(item: pytest.Item) -> tuple[Case, ...]:
    """The steps that a test of the matrix will want."""
    check = _CHECKS.get(getattr(item, "originalname", ""))
    if check is None or not isinstance(item, pytest.Function):
        return ()
    parameters: dict[str, Any] = item.callspec.params
    row, role, variant = parameters["spelt"]
    precision = parameters.get("precision", row.precisions[0])
    return cases_of(row, role, variant, check, precision, item.config.stash[_SESSION].backend.name)


def conclude(request: pytest.FixtureRequest, runner: Runner, record: CheckRecord) -> None:
    """Hand the record to the report and turn it into pytest's outcome, known issues considered."""
    session = request.config.stash[_SESSION]
    assert runner.imported is not None
    request.node.stash[_RECORD] = (record, runner.imported)
    request.node.user_properties += ci.properties(record)
    entry = known.match(session.known, record, header_of(session, runner.imported))
    if entry is not None:
        differs = known.judge(entry, record)
        if differs:
            pytest.fail(f"known issue: {differs}", pytrace=False)
        pytest.xfail(f"known issue: {entry.reason}")
    if record.outcome in ("not_run", "unsupported"):
        pytest.skip(f"{record.outcome}: {record.summary}")
    if record.outcome != "pass":
        pytest.fail(f"{record.outcome}: {record.summary}", pytrace=False)


def family_of(item: pytest.Item) -> Family | None:
    """The family of operators that a test is of; None for a test of another kind."""
    mark = item.get_closest_marker("operator")
    return None if mark is None else mark.args[0]


def conclude_operator(request: pytest.FixtureRequest, runner: Runner) -> None:
    """Run the test's family, hand the record to the report, and turn it into pytest's outcome.

    The first one plans all that were selected: lanes run ahead with them.
    """
    profile = profiles.chosen(request.config.getoption("--hypothesis-profile", None))
    home = str(request.config.rootpath / ".hypothesis")
    specs = {
        family: profiles.OperatorSpec(family, profile, home)
        for item in (request.node, *(() if request.config.stash[_SESSION].is_worker else request.session.items))
        if (family := family_of(item)) is not None
    }
    for family, spec in specs.items():
        for ranks in profiles.rank_counts(family):
            runner.plan_operator(spec, ranks)
    mine = family_of(request.node)
    assert mine is not None
    assert runner.imported is not None
    record = run_family(runner, specs[mine])
    request.node.stash[_RECORD] = (record, runner.imported)
    if record.outcome != "pass":
        text = f"{record.outcome}: {record.summary}"
        pytest.fail(text if record.falsifying is None else f"{text}\n\n{record.falsifying}", pytrace=False)
