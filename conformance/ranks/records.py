"""What goes into a job and what comes out: frozen, picklable, free of upstream types."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from conformance.errors import ConformanceError, UsageFault


@dataclass(frozen=True)
class Job:
    """One function, called once in each of `world_size` fresh processes.

    `label` appears in progress and messages. `target` is "package.module:function" and is called in every rank as
    `function(payload, RankContext)`. `deadline_s` counts from the first fork. Raises UsageFault if malformed.

    `spawned`: every rank is a new Python that runs preload by itself before the target, and the deadline is extended by that of
    preload. For devices whose driver does not bear a fork of a process that has called it; else ranks are forks.
    """

    label: str
    target: str
    payload: object
    world_size: int
    deadline_s: float
    spawned: bool = False

    def __post_init__(self) -> None:
        check_target(self.target)
        if self.world_size < 1 or self.deadline_s <= 0:
            raise UsageFault(f"job {self.label!r}: world_size must be at least 1 and deadline_s above 0")


@dataclass(frozen=True)
class RankContext:
    """What a rank is told: its place, a `file://` rendezvous new to this job, and the job's own directory.

    `scratch` is shared by the ranks of the job and removed when the job ends.
    """

    rank: int
    world_size: int
    rendezvous: str
    scratch: Path


@dataclass(frozen=True)
class Frame:
    """One line of a traceback; `source` is the stripped text of that line, "" if there is none to read."""

    file: str
    line: int
    function: str
    source: str


@dataclass(frozen=True)
class Raised:
    """An exception as text. `type` is qualified, without "builtins."; `frames` run from the outermost inwards.

    `cause` is what a traceback would show above it: `__cause__`, or `__context__` unless that is suppressed.
    """

    type: str
    message: str
    frames: tuple[Frame, ...]
    traceback: str
    cause: Raised | None


RankStatus = Literal["ok", "raised", "died", "stuck", "cancelled"]


@dataclass(frozen=True)
class RankReport:
    """How one rank ended.

    `ok`: returned `value`. `raised`: see `raised`. `died`: its process ended without either. `stuck`: still running at
    the deadline. `cancelled`: still running a grace period after another rank failed. `exit_code` and `signal` say how
    the process ended by itself; both are None for ranks that were killed here (`stuck`, `cancelled`). `stacks` holds
    the Python stacks of all threads of a rank that was killed or crashed, `log` the last 20 kB of stdout and stderr.
    """

    rank: int
    status: RankStatus
    value: object | None
    raised: Raised | None
    exit_code: int | None
    signal: int | None
    stacks: str
    log: str


@dataclass(frozen=True)
class JobReport:
    """How a job ended; `ranks` in rank order, `reason` one sentence, `failed_first` the rank where it began.

    `status` is `ok` if every rank is, `raised` if the first failure is an exception, else `crash`. `wall_s` runs from
    the first fork until no process of the job is left.
    """

    label: str
    status: Literal["ok", "raised", "crash"]
    ranks: tuple[RankReport, ...]
    wall_s: float
    reason: str
    failed_first: int | None

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def first_failure(self) -> RankReport | None:
        """The rank that failed first; of a job where none failed by itself, the first one stuck; None if ok."""
        return None if self.failed_first is None else self.ranks[self.failed_first]


class ServerFault(ConformanceError):
    """The rank server could not start or has ended; `raised` is preload's exception, if that was it."""

    def __init__(self, message: str, raised: Raised | None = None, log: str = "") -> None:
        super().__init__(message, raised, log)
        self.message = message
        self.raised = raised
        self.log = log

    def __str__(self) -> str:
        return f"{self.message}\n--- end of the server's log ---\n{self.log}" if self.log else self.message


class ValueFault(ConformanceError):
    """A value that a rank returned cannot be pickled there or unpickled here."""


def check_target(target: str) -> None:
    """Raise UsageFault unless `target` reads "package.module:function"."""
    module, colon, function = target.partition(":")
    if not (module and colon and function):
        raise UsageFault(f"{target!r} is no target; write it as 'package.module:function'")
