"""The life of one rank, from fork to `os._exit`."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import operator
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from conformance.errors import ConformanceError
from conformance.ranks import processes
from conformance.ranks.capture import capture, qualified_name
from conformance.ranks.records import Raised, RankContext, ValueFault
from conformance.ranks.wire import Preload, Request

#: Exit code of a rank whose own machinery failed, e.g. on a full disk (EX_SOFTWARE).
EX_SOFTWARE = 70


@dataclass(frozen=True)
class Outcome:
    """What a rank leaves in its result file. `at`: CLOCK_MONOTONIC seconds, the same clock in all processes."""

    value: bytes | None
    raised: Raised | None
    at: float


@dataclass(frozen=True)
class Files:
    """The files of one rank in the job's directory."""

    log: Path
    stacks: Path
    result: Path

    @classmethod
    def of(cls, scratch: Path, rank: int) -> Files:
        return cls(scratch / f"rank{rank}.log", scratch / f"rank{rank}.stacks", scratch / f"rank{rank}.pkl")


def live(request: Request, context: RankContext, group: int, master_port: int, parent: int) -> NoReturn:
    """Set this forked process up as a rank, call the target, leave the outcome in a file and exit."""
    code = EX_SOFTWARE
    try:
        files = Files.of(context.scratch, context.rank)
        _settle(context, files, group, master_port, parent)
        outcome = _outcome(request, context)
        unfinished = files.result.with_suffix(".unfinished")
        unfinished.write_bytes(pickle.dumps(outcome, protocol=5))
        unfinished.rename(files.result)  # a result file is whole, or it is not there
        code = 0 if outcome.raised is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        # No atexit handlers: those of the warm process are not ours, and upstream's may wait for other ranks.
        os._exit(code)


def resolve(target: str) -> Callable[..., Any]:
    """The function that "package.module:function" names."""
    module, _, function = target.partition(":")
    found: Callable[..., Any] = operator.attrgetter(function)(importlib.import_module(module))
    return found


def preload(what: Preload) -> object:
    """Import what the jobs need; what the function returned."""
    value: object = resolve(what.target)(pickle.loads(what.payload))
    return value


def _settle(context: RankContext, files: Files, group: int, master_port: int, parent: int) -> None:
    os.setpgid(0, group)
    processes.die_with_parent(parent)
    _redirect(0, Path(os.devnull), os.O_RDONLY)
    _redirect(1, files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(1, 2)
    stacks = os.open(files.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    place = {"RANK": context.rank, "LOCAL_RANK": context.rank}
    size = {"WORLD_SIZE": context.world_size, "LOCAL_WORLD_SIZE": context.world_size}
    os.environ.update({name: str(value) for name, value in (place | size).items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(master_port))


def _redirect(fd: int, path: Path, flags: int) -> None:
    opened = os.open(path, flags)
    os.dup2(opened, fd)
    os.close(opened)


def _outcome(request: Request, context: RankContext) -> Outcome:
    try:
        if request.preload is not None:
            _preload_again(request.preload)
        value = resolve(request.target)(pickle.loads(request.payload), context)
        return Outcome(_pickled(value, request.target), None, time.monotonic())
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: how a target ends is a finding
        at = time.monotonic()
        return Outcome(None, capture(error), at)


def _preload_again(what: Preload) -> None:
    try:
        preload(what)
    except Exception as error:  # it has worked in the warm process: no finding about the target
        raise ConformanceError(f"preload {what.target} worked in the warm process and fails in a rank: {error}") from error


def _pickled(value: object, target: str) -> bytes:
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        name = qualified_name(type(value))
        raise ValueFault(f"{target} returned a {name} that cannot be pickled: {error}") from error
