"""Seeing processes from outside: who carries a mark in its environment, who is whose child."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

#: The environment variable by which the tests find every process that descends from a server of theirs.
MARK = "CONFORMANCE_RANKS_TEST_MARK"


def marked(mark: str) -> list[int]:
    """The live processes that were started with MARK=mark, or forked from one."""
    return [pid for pid in _pids() if f"{MARK}={mark}".encode() in _read(pid, "environ").split(b"\0")]


def children_of(parent: int) -> list[int]:
    """The children of a process, zombies too."""
    return [pid for pid in _pids() if _stat(pid)[1:2] == [str(parent)]]


def is_zombie(pid: int) -> bool:
    return _stat(pid)[:1] == ["Z"]


def kill_all(mark: str) -> None:
    """Clean up after a planted fault."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str]:
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
