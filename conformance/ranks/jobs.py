"""One job, in the warm process: start the ranks, watch them, leave no process, report."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from conformance.ranks import processes, rank, spawned
from conformance.ranks.capture import tail
from conformance.ranks.records import JobReport, RankContext, RankReport, RankStatus
from conformance.ranks.wire import Finished, Request

#: How long the other ranks may take to end by themselves after the first failure, in seconds.
GRACE_S = 2.0
#: How long to wait for the stacks of ranks that do not end, in seconds.
STACKS_S = 0.5
#: Bytes kept of a rank's log and of its stacks.
LOG_LIMIT = 20_000
STACKS_LIMIT = 200_000


@dataclass(frozen=True)
class _End:
    """A rank that ended by itself."""

    exit: processes.Exit
    outcome: rank.Outcome | None

    @property
    def status(self) -> RankStatus:
        if self.outcome is None:
            return "died"
        return "ok" if self.outcome.raised is None else "raised"


def run_job(request: Request, scratch: Path, spared: frozenset[int]) -> Finished:
    """Run a job in the new directory `scratch`; afterwards neither that nor a child outside `spared` is left."""
    started = time.monotonic()
    scratch.mkdir()
    try:
        pids = _fork(request, scratch)
        ends = _watch(pids, scratch, started + request.deadline_s)
        _dump_stacks({pid: rank.Files.of(scratch, i).stacks for i, pid in enumerate(pids) if i not in ends})
    finally:
        processes.sweep(spared)
    try:
        return _finished(request, scratch, ends, time.monotonic() - started)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fork(request: Request, scratch: Path) -> list[int]:
    """Fork the ranks and return their pids. They form one process group: a rank that signals its own reaches no more.

    Raises OSError if the system has no process left; the ranks forked by then are for the caller to sweep.
    """
    parent, port = os.getpid(), _free_port()
    pids: list[int] = []
    for i in range(request.world_size):
        context = RankContext(i, request.world_size, f"file://{scratch}/rendezvous", scratch)
        group = pids[0] if pids else 0
        pid = os.fork()
        if pid == 0:
            live = rank.live if request.preload is None else spawned.live
            live(request, context, group, port, parent)
        pids.append(pid)
        with suppress(PermissionError):  # the kernel's word for: it has become another program since
            os.setpgid(pid, group or pid)  # the rank does it too: whoever comes first, both can rely on it
    return pids


def _free_port() -> int:
    """A port for MASTER_PORT, in case the target reads it. The ranks have the file rendezvous, which cannot clash."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _watch(pids: Sequence[int], scratch: Path, deadline: float) -> dict[int, _End]:
    """The ranks that end before the deadline, or within the grace period of the first failure, in order of ending."""
    ends: dict[int, _End] = {}
    poller = select.poll()
    with ExitStack() as opened:
        waiting = {}
        for i, pid in enumerate(pids):
            fd = os.pidfd_open(pid)
            opened.callback(os.close, fd)
            poller.register(fd, select.POLLIN)
            waiting[fd] = i
        while waiting and (left := deadline - time.monotonic()) > 0:
            batch = {}
            for fd, _ in poller.poll(left * 1000):
                poller.unregister(fd)
                i = waiting.pop(fd)
                batch[i] = _End(processes.exit_of(pids[i]), _read_outcome(rank.Files.of(scratch, i).result))
            # Of two that ended together, the one that died did so before the one that could still raise about it.
            ends.update(sorted(batch.items(), key=lambda item: item[1].status != "died"))
            if any(end.status != "ok" for end in batch.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
    return ends


def _read_outcome(path: Path) -> rank.Outcome | None:
    try:
        outcome = pickle.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    assert isinstance(outcome, rank.Outcome)
    return outcome


def _dump_stacks(files: Mapping[int, Path]) -> None:
    """Have the ranks `files` (pid to file) write their stacks; returns when the files stop growing."""
    for pid in files:
        os.kill(pid, signal.SIGUSR1)
    limit = time.monotonic() + STACKS_S
    before: list[int] = []
    while files and time.monotonic() < limit:
        time.sleep(0.02)
        sizes = [path.stat().st_size if path.exists() else 0 for path in files.values()]
        if all(sizes) and sizes == before:
            return
        before = sizes


def _finished(request: Request, scratch: Path, ends: Mapping[int, _End], wall_s: float) -> Finished:
    failed_first = _first_failed(ends)
    reports = tuple(
        _rank_report(i, ends.get(i), "stuck" if failed_first is None else "cancelled", rank.Files.of(scratch, i))
        for i in range(request.world_size)
    )
    stuck = [report.rank for report in reports if report.status == "stuck"]
    if failed_first is None and stuck:
        failed_first = stuck[0]
        reason = f"deadline of {request.deadline_s:g} s passed; {_ranks(stuck)} stuck"
    elif failed_first is None:
        reason = f"{_ranks(range(request.world_size))} returned"
    else:
        reason = _describe(failed_first, ends[failed_first])
    status = None if failed_first is None else reports[failed_first].status
    report = JobReport(
        label=request.label,
        status="ok" if status is None else "raised" if status == "raised" else "crash",
        ranks=reports,
        wall_s=wall_s,
        reason=reason,
        failed_first=failed_first,
    )
    outcomes = [ends[i].outcome if i in ends else None for i in range(request.world_size)]
    return Finished(report, tuple(None if outcome is None else outcome.value for outcome in outcomes))


def _first_failed(ends: Mapping[int, _End]) -> int | None:
    """The rank that failed first. Between exceptions their own time decides: writing one down takes a while."""
    failed = [i for i, end in ends.items() if end.status != "ok"]
    if not failed or ends[failed[0]].status == "died":
        return failed[0] if failed else None
    raised = {i: outcome.at for i in failed if (outcome := ends[i].outcome) is not None}
    return min(raised, key=lambda i: raised[i])


def _rank_report(i: int, end: _End | None, otherwise: RankStatus, files: rank.Files) -> RankReport:
    return RankReport(
        rank=i,
        status=otherwise if end is None else end.status,
        value=None,  # filled in by the client, see wire.py
        raised=None if end is None or end.outcome is None else end.outcome.raised,
        exit_code=None if end is None else end.exit.code,
        signal=None if end is None else end.exit.signal,
        stacks=tail(files.stacks, STACKS_LIMIT),
        log=tail(files.log, LOG_LIMIT),
    )


def _describe(i: int, end: _End) -> str:
    if end.outcome is None or end.outcome.raised is None:
        return f"rank {i} {end.exit}" + (" without a result" if end.exit.signal is None else "")
    raised = end.outcome.raised
    message = raised.message.strip().splitlines()
    return f"rank {i} raised {raised.type}" + (f": {message[0]}" if message else "")


def _ranks(numbers: Iterable[int]) -> str:
    listed = list(numbers)
    return f"rank {listed[0]}" if len(listed) == 1 else "ranks " + ", ".join(map(str, listed))
