"""What the tests of `conformance.ranks` run in ranks and in the warm process, and the faults they plant there."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ranks_processes import is_zombie, wait_until

from conformance.ranks import RankContext, capture, jobs, processes, rank, spawned, wire

#: Global state that a job changes; the next job must not see the change.
STATE = ["imported"]
#: Pids of the processes that have run preload, of which this one is a fork, or is one.
PRELOADED_BY: list[int] = []


class Touch:
    """A payload that changes `STATE` of whichever process unpickles it."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return touch, ("touched",)


def touch(word: str) -> None:
    STATE.append(word)


# --- preloads


def preload(faults: Sequence[str] = ()) -> int:
    """Plant faults in the warm process; returns its pid. The grace period is short so that the tests are."""
    jobs.GRACE_S = 0.3
    for fault in faults:
        FAULTS[fault]()
    PRELOADED_BY.append(os.getpid())
    return os.getpid()


def preload_unchanged(_: object) -> int:
    return os.getpid()


def preload_once(_: object) -> int:
    """Raises in every rank that runs it again."""
    if "PRELOADED" in os.environ:
        raise OSError("not again")
    os.environ["PRELOADED"] = "1"
    return preload()


def preload_with_thread(_: object) -> None:
    threading.Thread(target=time.sleep, args=(60,), name="lingerer", daemon=True).start()


def preload_raising(_: object) -> NoReturn:
    print("said before the failure")
    raise ImportError("no such stack")


def preload_dying(_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def preload_hanging(_: object) -> None:
    time.sleep(60)


def preload_torch(_: object) -> str:
    import torch.distributed

    return torch.__version__


# --- targets


def echo(payload: object, context: RankContext) -> tuple[object, int]:
    return payload, context.rank


def place(_: object, context: RankContext) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    seen = {name: os.environ[name] for name in names}
    seen |= {"rendezvous": context.rendezvous, "scratch": str(context.scratch), "exists": str(context.scratch.is_dir())}
    seen |= {"argv": " ".join(sys.argv[1:]), "stdin": sys.stdin.read(), "group": str(os.getpgid(0))}
    return seen


def mutate_state(_: object, context: RankContext) -> list[str]:
    STATE.append(f"rank {context.rank}")
    return STATE


def raise_on_rank_1(_: object, context: RankContext) -> int:
    if context.rank == 1:
        try:
            dict[str, int]()["absent"]
        except KeyError as error:
            raise TypeError("two words") from error
    return context.rank


def raise_later_on_rank_0(_: object, context: RankContext) -> NoReturn:
    time.sleep(0.1 if context.rank == 0 else 0)
    raise ConnectionError("peer gone") if context.rank == 0 else ValueError("root cause")


def raise_about_rank_1(_: object, context: RankContext) -> NoReturn:
    """Rank 1 is killed and rank 0 raises about it, while the warm process is stopped and sees neither."""
    pid = context.scratch / "pid"
    stopped = context.scratch / "stopped"
    if context.rank == 1:
        pid.with_suffix(".new").write_text(str(os.getpid()))
        pid.with_suffix(".new").rename(pid)
        wait_until(stopped.exists)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_until(pid.exists)
    os.kill(os.getppid(), signal.SIGSTOP)
    stopped.touch()
    wait_until(lambda: is_zombie(int(pid.read_text())))
    raise ConnectionError("peer gone")


def raise_what(payload: BaseException, _: RankContext) -> NoReturn:
    raise payload


def exit_hard(payload: int, context: RankContext) -> int:
    if context.rank == 1:
        os._exit(payload)
    return context.rank


def kill_rank_1(payload: int, context: RankContext) -> int:
    """Rank 1 ends by signal `payload`; the others wait for ever."""
    if context.rank == 1:
        os.kill(os.getpid(), payload)
    while True:
        time.sleep(1)


def segfault(_: object, __: RankContext) -> None:
    ctypes.string_at(0)


def sleep_for_ever(_: object, __: RankContext) -> None:
    while True:
        time.sleep(1)


def preloaded_by(_: object, __: RankContext) -> tuple[bool, int]:
    """Whether this process alone has run preload, and its process group."""
    return [os.getpid()] == PRELOADED_BY, os.getpgid(0)


def read_from_pipe(_: object, __: RankContext) -> None:
    reading, _writing = os.pipe()
    os.read(reading, 1)


def receive_from_socket(_: object, __: RankContext) -> None:
    ours, _theirs = socket.socketpair()
    ours.recv(1)


def pause_in_c(_: object, __: RankContext) -> None:
    """Blocks with the interpreter lock held: no Python code can run in this process."""
    ctypes.PyDLL(None).pause()
    ctypes.PyDLL(None).pause()


def unpicklable(_: object, __: RankContext) -> object:
    return lambda: 0


def large(payload: int, context: RankContext) -> bytes:
    return bytes([context.rank]) * payload


def unreadable(_: object, __: RankContext) -> object:
    """Of a type that only the rank can import."""
    module = type(sys)("only_in_the_rank")
    sys.modules[module.__name__] = module
    kind = type("Value", (), {"__module__": module.__name__})
    module.Value = kind  # type: ignore[attr-defined]
    return kind()


def talk(payload: int, context: RankContext) -> None:
    print("python says", context.rank)
    os.write(2, b"C says\n")
    sys.stdout.write("x" * payload + "end")


def leave_behind(payload: Sequence[str], context: RankContext) -> None:
    """Start processes that outlive the rank: in its group, or daemons in a session of their own; then act."""
    for kind in payload:
        if kind in ("group", "daemon"):
            subprocess.Popen(["sleep", "100"], start_new_session=kind == "daemon")
            warnings.simplefilter("ignore", ResourceWarning)
        elif kind == "wait":
            (context.scratch / f"waiting{context.rank}").touch()
            time.sleep(100)


def all_reduce(_: object, context: RankContext) -> list[float]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=context.rendezvous, rank=context.rank, world_size=context.world_size)
    values = torch.tensor([1.0, 10.0]) * (context.rank + 1)
    dist.all_reduce(values)
    dist.destroy_process_group()
    return [float(value) for value in values]


def die_in_all_reduce(_: object, context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=context.rendezvous, rank=context.rank, world_size=context.world_size)
    dist.barrier()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


# --- planted faults, each of which some check must catch


def plant(owner: object, name: str, value: object) -> None:
    """Replace an attribute, with something of another type if need be."""
    setattr(owner, name, value)


def _reversed_values() -> None:
    original = jobs._finished

    def finished(*args: Any) -> wire.Finished:
        result = original(*args)
        return replace(result, values=result.values[::-1])

    plant(jobs, "_finished", finished)


def _outermost_frame_only() -> None:
    original = capture._frames
    plant(capture, "_frames", lambda step: original(step)[:1])


def _always_exit_0() -> None:
    plant(processes, "exit_of", lambda _: processes.Exit(0, None))


def _no_fault_stacks() -> None:
    plant(faulthandler, "enable", lambda *_: None)


def _no_stacks() -> None:
    plant(jobs, "_dump_stacks", lambda _: None)


def _endless_grace() -> None:
    plant(jobs, "GRACE_S", 1e6)


def _not_fresh() -> None:
    """Unpickle the payload and run the target in the warm process first."""
    original = jobs.run_job

    def run_job(request: wire.Request, scratch: Path, spared: frozenset[int]) -> wire.Finished:
        rank.resolve(request.target)(pickle.loads(request.payload), RankContext(9, 9, "", scratch))
        return original(request, scratch, spared)

    plant(jobs, "run_job", run_job)


def _no_frames() -> None:
    plant(capture, "_frames", lambda _: [])


def _no_adoption() -> None:
    """Undo PR_SET_CHILD_SUBREAPER, so that orphans go to the supervisor instead."""
    processes._prctl(processes._PR_SET_CHILD_SUBREAPER, 0)


def _reap_only() -> None:
    def sweep(_: frozenset[int] = frozenset()) -> None:
        time.sleep(0.1)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    plant(processes, "sweep", sweep)


def _no_sweep() -> None:
    plant(processes, "sweep", lambda _=frozenset(): None)


def _no_value_check() -> None:
    plant(rank, "_pickled", lambda *_: pickle.dumps(None))


def _lowest_rank_first() -> None:
    plant(jobs, "_first_failed", lambda ends: min((i for i, end in ends.items() if end.status != "ok"), default=None))


def _order_of_rank() -> None:
    plant(jobs, "sorted", lambda items, **_: list(items))


def _no_redirection() -> None:
    plant(rank, "_redirect", lambda *_: None)


def _whole_log() -> None:
    plant(jobs, "LOG_LIMIT", 10**9)


def _same_scratch() -> None:
    plant(shutil, "rmtree", lambda *_, **__: None)


def _forks_only() -> None:
    plant(spawned, "live", rank.live)


def _no_environment() -> None:
    os.environ.update(dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"), "7"))
    os.environ["MASTER_ADDR"] = "nowhere"
    plant(os.environ, "update", lambda *_, **__: None)


FAULTS = {
    name.strip("_"): fault
    for name, fault in list(globals().items())
    if name.startswith("_") and callable(fault) and getattr(fault, "__module__", "") == __name__
}
