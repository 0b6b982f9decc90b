"""Jobs side by side: in the planned order, wanted ones first, and no thread or process left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.lanes import Lanes
from conformance.ranks import Job, JobReport, RankServer, ServerFault


def job(target: str, payload: object = None, deadline_s: float = 30) -> Job:
    return Job(target, f"lanes_targets:{target}", payload, 1, deadline_s)


@pytest.fixture
def one() -> Iterator[Lanes]:
    lanes = Lanes([RankServer("lanes_targets:preload")])
    lanes.start()
    yield lanes
    lanes.close()


def value(report: JobReport) -> object:
    assert report.ok, report.reason
    return report.ranks[0].value


def test_planned_in_order_and_wanted_first(one: Lanes, tmp_path: Path) -> None:
    order, gate = tmp_path / "order", tmp_path / "gate"
    held = one.plan(job("wait_for", str(gate)))
    futures = [one.plan(job("note", (str(order), name))) for name in "abc"]
    gate_opener = threading.Timer(0.2, gate.touch)
    gate_opener.start()
    assert value(one.want(futures[2])) == "c"
    assert [value(one.want(future)) for future in futures] == ["a", "b", "c"]
    assert value(one.want(held)) is None
    assert order.read_text().split() == ["c", "a", "b"]


def test_two_lanes_run_two_jobs_at_a_time(tmp_path: Path) -> None:
    lanes = Lanes([RankServer("lanes_targets:preload") for _ in range(2)])
    try:
        lanes.start()
        futures = [lanes.plan(job("meet", (str(tmp_path / "met"), name))) for name in "ab"]
        assert [value(lanes.want(future)) for future in futures] == [True, True]
    finally:
        lanes.close()


def test_one_lane_runs_one_at_a_time(one: Lanes, tmp_path: Path) -> None:
    """The negative of the test above: were jobs to overlap, this would come out true."""
    order, gate = tmp_path / "order", tmp_path / "gate"
    held = one.plan(job("wait_for", str(gate)))
    second = one.plan(job("note", (str(order), "second")))
    time.sleep(0.3)
    assert not order.exists()
    gate.touch()
    one.want(held)
    assert value(one.want(second)) == "second"


def test_a_server_s_failure_is_its_job_s_and_the_lane_goes_on(one: Lanes, tmp_path: Path) -> None:
    broken = one.plan(job("kill_the_server"))
    sound = one.plan(job("note", (str(tmp_path / "order"), "after")))
    with pytest.raises(ServerFault, match="died"):
        one.want(broken)
    assert value(one.want(sound)) == "after"


def test_close_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    lanes = Lanes([RankServer("lanes_targets:preload")])
    lanes.start()
    running = lanes.plan(job("wait_for", str(tmp_path / "never"), 600))
    waiting = lanes.plan(job("note", (str(tmp_path / "order"), "late")))
    time.sleep(0.3)
    began = time.monotonic()
    lanes.close()
    lanes.close()
    assert time.monotonic() - began < 10
    with pytest.raises(ServerFault):
        running.result(timeout=0)
    assert waiting.cancelled()
    assert not (tmp_path / "order").exists()


def test_start_says_what_preload_raised() -> None:
    lanes = Lanes([RankServer("ranks_targets:preload_raising") for _ in range(2)])
    with pytest.raises(ServerFault):
        lanes.start()
    lanes.close()
