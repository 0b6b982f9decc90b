"""The few things about Linux processes that Python's standard library does not offer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends; exit at once if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that `sweep` finds it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def sweep(spared: frozenset[int] = frozenset(), patience_s: float = 5.0) -> None:
    """Kill and reap all children but the spared, and the orphans adopted from them, until none is left.

    Needs `adopt_orphans` before. Finds more than a kill of the process group would: daemons leave that.
    A process that outlasts SIGKILL (it hangs in a driver) is named in the log after `patience_s` and left.
    """
    limit = time.monotonic() + patience_s
    while True:
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if reaped:
            continue
        left = children() - spared
        if not left:
            return
        if time.monotonic() > limit:
            print(f"processes that outlasted SIGKILL: {sorted(left)}", file=sys.stderr, flush=True)
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def children() -> frozenset[int]:
    """The children of this process, zombies too."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or is not ours to read
                # "pid (name) state ppid ...", and the name may hold anything.
                if int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.add(int(entry.name))
    return frozenset(found)


@dataclass(frozen=True)
class Exit:
    """How a process ended: one of exit code and signal."""

    code: int | None
    signal: int | None

    def __str__(self) -> str:
        return f"exited with code {self.code}" if self.signal is None else f"was killed by {signal_name(self.signal)}"


def exit_of(pid: int) -> Exit:
    """How a child ended (waits for it); the child stays a zombie, so its pid stays taken."""
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert info is not None  # only None with WNOHANG
    if info.si_code == os.CLD_EXITED:
        return Exit(info.si_status, None)
    return Exit(None, info.si_status)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
