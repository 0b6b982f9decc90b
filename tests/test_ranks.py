"""Jobs on the rank server. Every check runs twice: on a sound server, and on one with a fault that it must catch."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ranks_processes import MARK, children_of, marked
from ranks_targets import FAULTS, Touch

from conformance import blame
from conformance.errors import UsageFault
from conformance.ranks import Job, JobReport, RankServer, ValueFault


class Bench:
    """A server, the pid of its warm process, and a short way to run a job."""

    def __init__(self, server: RankServer, warm: int, mark: str) -> None:
        self.server, self.warm, self.mark = server, warm, mark

    def run(
        self, function: str, payload: object = None, *, ranks: int = 2, deadline_s: float = 20.0, spawned: bool = False
    ) -> JobReport:
        return self.server.run(Job(f"test {function}", f"ranks_targets:{function}", payload, ranks, deadline_s, spawned))


@contextmanager
def bench(*faults: str, preload: str = "preload") -> Iterator[Bench]:
    mark = uuid.uuid4().hex
    with RankServer(f"ranks_targets:{preload}", faults, env={MARK: mark}) as server:
        warm = server.start()
        assert isinstance(warm, int)
        yield Bench(server, warm, mark)
    assert not marked(mark)


@pytest.fixture(scope="module")
def sound() -> Iterator[Bench]:
    with bench() as opened:
        yield opened


def statuses(report: JobReport) -> list[str]:
    return [rank.status for rank in report.ranks]


def values_come_in_rank_order(bench: Bench) -> None:
    report = bench.run("echo", {"a": (1, None)}, ranks=3)
    assert report.ok
    assert report.status == "ok"
    assert report.first_failure is None
    assert report.reason == "ranks 0, 1, 2 returned"
    assert [rank.rank for rank in report.ranks] == [0, 1, 2]
    assert [rank.value for rank in report.ranks] == [({"a": (1, None)}, rank) for rank in range(3)]
    assert [(rank.exit_code, rank.signal, rank.raised) for rank in report.ranks] == [(0, None, None)] * 3


def values_may_be_large(bench: Bench) -> None:
    report = bench.run("large", 50_000_000)
    assert [rank.value == bytes([rank.rank]) * 50_000_000 for rank in report.ranks] == [True, True]


def a_rank_knows_its_place(bench: Bench) -> None:
    first, second = bench.run("place"), bench.run("place", ranks=1)
    seen = [rank.value for report in (first, second) for rank in report.ranks]
    places = []
    for value in seen:
        assert isinstance(value, dict)
        assert (value["argv"], value["stdin"], value["exists"]) == ("", "", "True")
        assert value["rendezvous"] == f"file://{value['scratch']}/rendezvous"
        assert value["MASTER_ADDR"] == "127.0.0.1"
        assert 1024 < int(value["MASTER_PORT"]) < 65536
        places.append(tuple(value[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")))
    assert places == [("0", "0", "2", "2"), ("1", "1", "2", "2"), ("0", "0", "1", "1")]
    groups = [value["group"] for value in seen if isinstance(value, dict)]
    assert groups[0] == groups[1] != groups[2]


def scratch_is_new_and_removed(bench: Bench) -> None:
    directories = []
    for _ in range(2):
        (rank,) = bench.run("place", ranks=1).ranks
        assert isinstance(rank.value, dict)
        directories.append(Path(rank.value["scratch"]))
    assert directories[0] != directories[1]
    assert not any(directory.exists() for directory in directories)


def an_exception_comes_with_its_frames(bench: Bench) -> None:
    report = bench.run("raise_on_rank_1")
    assert statuses(report) == ["ok", "raised"]
    assert report.status == "raised"
    assert report.first_failure is report.ranks[1]
    assert report.reason == "rank 1 raised TypeError: two words"
    raised = report.ranks[1].raised
    assert raised is not None
    assert (raised.type, raised.message) == ("TypeError", "two words")
    assert [(frame.function, frame.source) for frame in raised.frames] == [
        ("raise_on_rank_1", 'raise TypeError("two words") from error')
    ]
    frame = raised.frames[0]
    assert Path(frame.file).name == "ranks_targets.py"
    assert Path(frame.file).read_text().splitlines()[frame.line - 1].strip() == frame.source
    assert "TypeError: two words" in raised.traceback
    assert "conformance/ranks" not in raised.traceback
    assert raised.cause is not None
    assert (raised.cause.type, raised.cause.message, raised.cause.cause) == ("KeyError", "'absent'", None)


def frames_reach_the_innermost(bench: Bench) -> None:
    report = bench.run("raise_what", {"not": "an exception"}, ranks=1)
    raised = report.ranks[0].raised
    assert raised is not None
    assert raised.type == "TypeError"
    report = bench.run("no.such", None, ranks=1)
    raised = report.ranks[0].raised
    assert raised is not None
    assert raised.type == "AttributeError"
    assert len(raised.frames) > 1
    assert raised.frames[-1].function == "resolve"


def exits_are_exceptions_where_they_are(bench: Bench) -> None:
    for error in (SystemExit(3), KeyboardInterrupt("by hand")):
        report = bench.run("raise_what", error, ranks=1)
        assert statuses(report) == ["raised"]
        assert report.ranks[0].raised is not None
        assert report.ranks[0].raised.type == type(error).__name__
    for code in (0, 7):
        report = bench.run("exit_hard", code)
        assert statuses(report) == ["ok", "died"]
        assert report.status == "crash"
        assert (report.ranks[1].exit_code, report.ranks[1].signal) == (code, None)
        assert report.reason == f"rank 1 exited with code {code} without a result"


def a_kill_cancels_those_who_wait(bench: Bench) -> None:
    report = bench.run("kill_rank_1", signal.SIGKILL, ranks=3, deadline_s=4.0)
    assert statuses(report) == ["cancelled", "died", "cancelled"]
    assert report.status == "crash"
    assert report.first_failure is report.ranks[1]
    assert report.ranks[1].signal == signal.SIGKILL
    assert report.reason == "rank 1 was killed by SIGKILL"
    assert "in kill_rank_1" in report.ranks[0].stacks
    assert "in kill_rank_1" in report.ranks[2].stacks
    assert report.wall_s < 2.3


def a_segfault_leaves_a_stack(bench: Bench) -> None:
    report = bench.run("segfault", ranks=1)
    assert statuses(report) == ["died"]
    assert report.ranks[0].signal == signal.SIGSEGV
    assert report.reason == "rank 0 was killed by SIGSEGV"
    assert "in segfault" in report.ranks[0].stacks


def a_deadline_shows_where_ranks_hang(bench: Bench) -> None:
    for function in ("sleep_for_ever", "read_from_pipe", "receive_from_socket", "pause_in_c"):
        report = bench.run(function, deadline_s=0.3)
        assert statuses(report) == ["stuck", "stuck"]
        assert report.status == "crash"
        assert report.first_failure is report.ranks[0]
        assert report.reason == "deadline of 0.3 s passed; ranks 0, 1 stuck"
        assert all(f"in {function}" in rank.stacks for rank in report.ranks)
        assert all(rank.exit_code is None and rank.signal is None for rank in report.ranks)
        assert 0.3 <= report.wall_s < 2.3


def state_is_fresh(bench: Bench) -> None:
    for _ in range(2):
        report = bench.run("mutate_state", Touch())
        assert [rank.value for rank in report.ranks] == [["imported", "touched", f"rank {i}"] for i in range(2)]


def nothing_is_left_behind(bench: Bench) -> None:
    before = set(marked(bench.mark))
    assert bench.warm in before
    assert bench.run("leave_behind", ["group", "daemon"]).ok
    assert set(marked(bench.mark)) <= before


def no_zombie_stays(bench: Bench) -> None:
    assert bench.run("echo").ok
    assert bench.run("exit_hard", 1).status == "crash"
    assert children_of(bench.warm) == []


def an_unpicklable_value_is_named(bench: Bench) -> None:
    report = bench.run("unpicklable", ranks=1)
    assert statuses(report) == ["raised"]
    raised = report.ranks[0].raised
    assert raised is not None
    assert raised.type == "conformance.ranks.records.ValueFault"
    assert raised.message.startswith("ranks_targets:unpicklable returned a function that cannot be pickled")
    assert raised.cause is not None


def the_first_failure_is_the_root_cause(bench: Bench) -> None:
    report = bench.run("raise_later_on_rank_0")
    assert statuses(report) == ["raised", "raised"]
    assert report.first_failure is report.ranks[1]
    assert report.reason == "rank 1 raised ValueError: root cause"


def of_two_seen_at_once_the_dead_was_first(bench: Bench) -> None:
    resume = threading.Timer(0.5, os.kill, (bench.warm, signal.SIGCONT))
    resume.start()
    report = bench.run("raise_about_rank_1")
    resume.join()
    assert statuses(report) == ["raised", "died"]
    assert report.reason == "rank 1 was killed by SIGKILL"


def output_goes_to_the_report(bench: Bench) -> None:
    report = bench.run("talk", 10)
    assert [rank.log for rank in report.ranks] == [f"python says {i}\nC says\nxxxxxxxxxxend" for i in range(2)]


def spawned_ranks_run_preload_themselves(bench: Bench) -> None:
    report = bench.run("preloaded_by", spawned=True)
    values = [rank.value for rank in report.ranks]
    assert all(isinstance(value, tuple) and value[0] for value in values), values
    assert len({value[1] for value in values if isinstance(value, tuple)}) == 1
    assert [rank.value[0] for rank in bench.run("preloaded_by").ranks if isinstance(rank.value, tuple)] == [False, False]


def spawned_ranks_end_as_forked_ones_do(bench: Bench) -> None:
    report = bench.run("place", spawned=True)
    assert [value["RANK"] + value["stdin"] + value["argv"] for value in _values(report)] == ["0", "1"]
    assert bench.run("raise_on_rank_1", spawned=True).reason == "rank 1 raised TypeError: two words"
    report = bench.run("kill_rank_1", signal.SIGKILL, spawned=True)
    assert statuses(report) == ["cancelled", "died"]
    assert "in kill_rank_1" in report.ranks[0].stacks
    before = set(marked(bench.mark))
    assert bench.run("leave_behind", ["group", "daemon"], spawned=True).ok
    assert set(marked(bench.mark)) <= before


def _values(report: JobReport) -> list[dict[str, str]]:
    return [rank.value for rank in report.ranks if isinstance(rank.value, dict)]


def a_long_log_is_cut(bench: Bench) -> None:
    (rank,) = bench.run("talk", 1_000_000, ranks=1).ranks
    assert len(rank.log) == 20_000
    assert rank.log.endswith("xend")


CHECKS = [
    (values_come_in_rank_order, "reversed_values"),
    (values_may_be_large, "reversed_values"),
    (a_rank_knows_its_place, "no_environment"),
    (scratch_is_new_and_removed, "same_scratch"),
    (an_exception_comes_with_its_frames, "no_frames"),
    (frames_reach_the_innermost, "outermost_frame_only"),
    (exits_are_exceptions_where_they_are, "always_exit_0"),
    (a_kill_cancels_those_who_wait, "endless_grace"),
    (a_kill_cancels_those_who_wait, "no_stacks"),
    (a_segfault_leaves_a_stack, "no_fault_stacks"),
    (a_deadline_shows_where_ranks_hang, "no_stacks"),
    (state_is_fresh, "not_fresh"),
    (nothing_is_left_behind, "reap_only"),
    (nothing_is_left_behind, "no_adoption"),
    (no_zombie_stays, "no_sweep"),
    (an_unpicklable_value_is_named, "no_value_check"),
    (the_first_failure_is_the_root_cause, "lowest_rank_first"),
    (of_two_seen_at_once_the_dead_was_first, "order_of_rank"),
    (output_goes_to_the_report, "no_redirection"),
    (a_long_log_is_cut, "whole_log"),
    (spawned_ranks_run_preload_themselves, "forks_only"),
    (spawned_ranks_end_as_forked_ones_do, "no_stacks"),
]


@pytest.mark.parametrize("check", dict.fromkeys(check for check, _ in CHECKS), ids=lambda check: check.__name__)
def test_sound_server(check: Callable[[Bench], None], sound: Bench) -> None:
    check(sound)
    assert sound.run("echo").ok  # whatever happened in the job before


@pytest.mark.parametrize(("check", "fault"), CHECKS, ids=lambda part: getattr(part, "__name__", part))
def test_planted_fault_is_caught(check: Callable[[Bench], None], fault: str) -> None:
    with bench(fault) as faulty, pytest.raises(AssertionError):
        check(faulty)


def test_every_planted_fault_is_used() -> None:
    assert set(FAULTS) == {fault for _, fault in CHECKS}


def test_server_lives_through_all_crashes() -> None:
    with bench() as opened:
        for function, payload in [("raise_on_rank_1", None), ("exit_hard", 7), ("segfault", None), ("unpicklable", 0)]:
            assert not opened.run(function, payload).ok
            assert opened.run("echo").ok
        assert opened.warm in marked(opened.mark)


def test_default_grace_is_honoured() -> None:
    with bench(preload="preload_unchanged") as opened:
        report = opened.run("kill_rank_1", signal.SIGKILL)
    assert statuses(report) == ["cancelled", "died"]
    assert 2.0 <= report.wall_s < 4.0


def test_preload_that_fails_in_a_spawned_rank_is_our_own_fault() -> None:
    with bench(preload="preload_once") as opened:
        report = opened.run("echo", ranks=1, spawned=True)
    raised = report.ranks[0].raised
    assert raised is not None
    assert blame.kind_of(raised, ()) == "error"
    assert raised.message == "preload ranks_targets:preload_once worked in the warm process and fails in a rank: not again"


def test_value_of_a_type_unknown_here(sound: Bench) -> None:
    with pytest.raises(ValueFault, match="job 'test unreadable': the value of rank 0 cannot be unpickled here"):
        sound.run("unreadable")
    assert sound.run("echo").ok


def test_nothing_is_printed_here(capfd: pytest.CaptureFixture[str]) -> None:
    with bench() as opened:
        assert opened.run("talk", 10).ok
        assert not opened.run("segfault").ok
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("target", "world_size", "deadline_s", "message"),
    [
        ("package.module", 1, 1.0, "write it as 'package.module:function'"),
        ("package.module:", 1, 1.0, "write it as 'package.module:function'"),
        ("a:b", 0, 1.0, "world_size must be at least 1"),
        ("a:b", 1, 0.0, "deadline_s above 0"),
    ],
)
def test_malformed_job(target: str, world_size: int, deadline_s: float, message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        Job("label", target, None, world_size, deadline_s)
