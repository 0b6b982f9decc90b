"""The pytest wiring of the suite: its options, the fixture that runs cases, and how a check's record becomes a test's outcome.

What a run is, from its selection to its table, is in `session`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance import ci, known, matrix, npu
from conformance.checks import cases_of, run_check, watched
from conformance.matrix import Role, Row
from conformance.operators import profiles
from conformance.operators.record import run_family
from conformance.results import ROUTES, Check, Precision
from conformance.runner import Case, Runner
from conformance.session import RECORD, SESSION, Session, family_of, header_of, one_line

HERE = Path(__file__).resolve().parent
#: Of the checkout that this is; of an installed package, those of the directory where pytest runs.
REPORTS = matrix.ROOT / "reports" if matrix.MATRIX.is_file() else Path("reports")
#: Rank servers of one pytest process: a server takes a gigabyte, and cases have up to four ranks of their own.
MOST_LANES = 4
#: Tests of the matrix that run steps -> the check that they make.
_CHECKS: dict[str, Check] = {"test_engaged": "engaged", "test_parity": "parity"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "verl + MindSpeed conformance")
    group.addoption("--matrix", type=Path, default=matrix.MATRIX, metavar="FILE", help="other rows than those of matrix.yaml")
    group.addoption("--row", action="append", default=[], metavar="ID", help="run this row only (repeatable)")
    group.addoption("--backend", choices=["auto", "plain", "mindspeed"], default="auto", help="default: MindSpeed if found")
    group.addoption("--npu", choices=["auto", "emulated", "real"], default="auto", help="default: a real NPU if found")
    group.addoption("--route", choices=ROUTES, default=None, help="way through verl; default: the installed release's users'")
    group.addoption("--force", action="store_true", help="run although megatron-core does not match the MindSpeed branch")
    group.addoption("--reports", type=Path, default=REPORTS, metavar="DIR", help="where results and tables go")
    group.addoption("--resume", type=Path, default=None, metavar="DIR", help="take up an interrupted run: DIR is its directory")


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
    npu.keep_torch_alone()
    with one_line():
        session = Session(config)
    config.stash[SESSION] = session
    config.pluginmanager.register(session, "conformance-session")


def _is_wanted(config: pytest.Config) -> bool:
    """Whether this invocation collects from `conformance/` at all."""
    names = [str(argument).split("::")[0] for argument in config.args]
    if config.option.pyargs and any(name.split(".")[0] == __package__ for name in names):
        return True
    return any((config.invocation_params.dir / name).resolve().is_relative_to(HERE) for name in names)


@pytest.fixture(scope="session")
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """The runner of this process, started: its rank servers have imported the stack.

    Without `-n`, a server for each core, which run ahead with the cases of the selected tests. A worker has one server, and
    does not know which tests it will be given; on hardware the ranks of two cases would share the devices.
    """
    session = request.config.stash[SESSION]
    alone = session.is_worker or npu.may_be_real(session.backend.npu)
    lanes = 1 if alone else min(len(os.sched_getaffinity(0)), MOST_LANES)
    with Runner(session.backend, watched(session.rows, session.backend.name), lanes=lanes, route=session.route) as started:
        _announce(request, f"conformance: importing the stack, rank servers: {lanes}")
        with one_line():
            session.require_right_stack(started.start())
        if not session.is_worker:
            started.plan(case for item in request.session.items for case in _cases_of(item))
        yield started


def _announce(request: pytest.FixtureRequest, line: str) -> None:
    """Say it at once, although what a fixture prints is captured: the import takes half a minute on a cold disk."""
    session = request.config.stash[SESSION]
    if not session.is_worker:
        with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():  # type: ignore[union-attr]
            session.say(line)


def _cases_of(item: pytest.Item) -> tuple[Case, ...]:
    """The steps that a test of the matrix will want."""
    check = _CHECKS.get(getattr(item, "originalname", ""))
    if check is None or not isinstance(item, pytest.Function):
        return ()
    parameters: dict[str, Any] = item.callspec.params
    row, role, variant = parameters["spelt"]
    session = item.config.stash[SESSION]
    if session.recorded((row.id, role, variant, check, parameters.get("precision"))) is not None:
        return ()
    precision = parameters.get("precision", row.precisions[0])
    return cases_of(row, role, variant, check, precision, session.backend.name)


def conclude(
    request: pytest.FixtureRequest, runner: Runner, spelt: tuple[Row, Role, str], check: Check, precision: Precision | None = None
) -> None:
    """Make the check, hand its record to the report and turn it into pytest's outcome, known issues considered.

    What an interrupted run has recorded is not run again.
    """
    session = request.config.stash[SESSION]
    row, role, variant = spelt
    recorded = session.recorded((row.id, role, variant, check, precision))
    record = recorded or run_check(runner, row, role, variant, check, precision)
    assert runner.imported is not None
    request.node.stash[RECORD] = (record, runner.imported)
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


def conclude_operator(request: pytest.FixtureRequest, runner: Runner) -> None:
    """Run the test's family, hand the record to the report, and turn it into pytest's outcome.

    The first one plans all that were selected: lanes run ahead with them.
    """
    profile = profiles.chosen(request.config.getoption("--hypothesis-profile", None))
    home = str(request.config.rootpath / ".hypothesis")
    specs = {
        family: profiles.OperatorSpec(family, profile, home)
        for item in (request.node, *(() if request.config.stash[SESSION].is_worker else request.session.items))
        if (family := family_of(item)) is not None
    }
    for family, spec in specs.items():
        for ranks in profiles.rank_counts(family):
            runner.plan_operator(spec, ranks)
    mine = family_of(request.node)
    assert mine is not None
    assert runner.imported is not None
    record = run_family(runner, specs[mine])
    request.node.stash[RECORD] = (record, runner.imported)
    if record.outcome != "pass":
        text = f"{record.outcome}: {record.summary}"
        pytest.fail(text if record.falsifying is None else f"{text}\n\n{record.falsifying}", pytrace=False)
