"""Ranks forked from a process that has imported torch: collectives over the job's rendezvous."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from conformance.ranks import Job, RankServer

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer("ranks_targets:preload_torch", env={"OMP_NUM_THREADS": "1"}) as server:
        assert isinstance(server.start(), str)
        yield server


def test_gloo_all_reduce_in_job_after_job(server: RankServer) -> None:
    for _ in range(2):
        report = server.run(Job("gloo", "ranks_targets:all_reduce", None, 2, 30))
        assert report.ok, report
        assert [rank.value for rank in report.ranks] == [[3.0, 30.0]] * 2


def test_rank_killed_in_a_collective_is_the_first_failure(server: RankServer) -> None:
    report = server.run(Job("gloo", "ranks_targets:die_in_all_reduce", None, 2, 30))
    assert report.status == "crash"
    assert report.first_failure is report.ranks[1]
    assert report.ranks[1].signal == signal.SIGKILL
    assert report.ranks[0].status in ("raised", "cancelled")  # gloo notices a closed connection, mostly
    assert report.wall_s < 5
    assert server.run(Job("gloo", "ranks_targets:all_reduce", None, 2, 30)).ok
