"""What the tests of `conformance.lanes` run in ranks: each leaves a line in a file, in the order in which it began."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from conformance.ranks import RankContext


def preload(_: object) -> int:
    return os.getpid()


def note(payload: tuple[str, str], _: RankContext) -> str:
    """Write `name` into the file."""
    file, name = payload
    with Path(file).open("a") as out:
        out.write(f"{name}\n")
    return name


def meet(payload: tuple[str, str], context: RankContext) -> bool:
    """Note, then wait up to ten seconds until two have noted: true only if two jobs run at the same time."""
    note(payload, context)
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        if len(Path(payload[0]).read_text().splitlines()) == 2:
            return True
        time.sleep(0.01)
    return False


def wait_for(payload: str, _: RankContext) -> None:
    """Until the file is there."""
    while not Path(payload).exists():
        time.sleep(0.01)


def kill_the_server(_: object, __: RankContext) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
