"""The client's side: start the server, hand it jobs, and never leave it behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType

import conformance
from conformance.errors import UsageFault
from conformance.ranks import wire
from conformance.ranks.capture import tail
from conformance.ranks.processes import Exit
from conformance.ranks.records import Job, JobReport, RankReport, ServerFault, ValueFault, check_target

#: Beyond a job's deadline, the time for killing, reaping and sending the report, in seconds.
_MARGIN_S = 60.0
#: Beyond the start-up deadline, the time for the stacks to reach the log, in seconds.
_STARTUP_MARGIN_S = 0.5
_LOG_LIMIT = 20_000


@dataclass(frozen=True)
class _Server:
    """A running server: its supervisor, our end of the connection, and the directory of its log and jobs."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    directory: Path

    @property
    def log(self) -> Path:
        return self.directory / "server.log"

    @property
    def idle(self) -> bool:
        """Whether it waits for a job: between jobs there is nothing to read but the end of the connection."""
        return not select.select([self.control], [], [], 0)[0]

    def stop(self) -> int:
        """End all its processes, remove its directory, and return its exit code."""
        self.control.close()  # the supervisor waits for this
        try:
            return self.process.wait(timeout=10)
        finally:
            self.process.kill()  # does nothing to a process that has been waited for
            self.process.wait()
            shutil.rmtree(self.directory, ignore_errors=True)


class RankServer(contextlib.AbstractContextManager["RankServer"]):
    """A warm process with the stack imported, and the jobs that fork from it; one job at a time.

    `preload` ("package.module:function") is called once as `function(preload_payload)`; it may import what it likes,
    but must not start threads, and must not run parallel torch operations, whose thread pools do not survive a fork.
    The server gets this process's environment overlaid by `env`, its `sys.path` (behind `env`'s PYTHONPATH, if given)
    and its working directory. Nothing is printed here: its output goes to a log that a `ServerFault` quotes.
    """

    def __init__(
        self,
        preload: str,
        preload_payload: object = None,
        *,
        env: Mapping[str, str] = MappingProxyType({}),
        startup_deadline_s: float = 180.0,
    ) -> None:
        check_target(preload)
        self._preload = wire.Preload(preload, pickle.dumps(preload_payload, protocol=5))
        self._env = dict(env)
        self._startup_deadline_s = startup_deadline_s
        self._server: _Server | None = None
        self._closed = False
        #: Seconds that the last start took, from spawning Python to the end of preload.
        self.startup_s = 0.0
        #: Names of Python threads that preload left running. They do not exist in the ranks, but their locks do.
        self.threads: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        """Whether the server runs, as far as it can be known between two calls."""
        return self._server is not None and self._server.idle

    def start(self) -> object:
        """Start the server (anew, if it runs) and return what preload returned.

        Raises ServerFault if preload raised, did not end within the start-up deadline, or its process died.
        """
        if self._closed:
            raise ServerFault("this RankServer is closed")
        self._stop()
        began = time.monotonic()
        self._server = self._spawn()
        path = [*filter(None, self._env.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
        hello = wire.Hello(tuple(os.path.abspath(entry) for entry in path), self._preload, self._startup_deadline_s)
        what = f"preload {self._preload.target}"
        reply = self._exchange(self._server, hello, what, self._startup_deadline_s + _STARTUP_MARGIN_S)
        assert isinstance(reply, wire.Started)
        self.startup_s = time.monotonic() - began
        self.threads = reply.threads
        return pickle.loads(reply.value)

    def run(self, job: Job) -> JobReport:
        """Run a job to its end, whatever that is. Starts the server if it does not run (or no longer does).

        Raises ServerFault if the server itself fails; the next call starts a new one. Any other exception, such as
        KeyboardInterrupt, also ends the server, and the job with it. ValueFault: a rank returned a value of a type that
        cannot be imported here.
        """
        if not self.alive:
            self.start()
        assert self._server is not None
        payload = pickle.dumps(job.payload, protocol=5)
        preload, extra_s = (self._preload, self._startup_deadline_s) if job.spawned else (None, 0.0)
        request = wire.Request(job.label, job.target, payload, job.world_size, job.deadline_s + extra_s, preload)
        reply = self._exchange(self._server, request, f"job {job.label!r}", request.deadline_s + _MARGIN_S)
        assert isinstance(reply, wire.Finished)
        pairs = zip(reply.report.ranks, reply.values, strict=True)
        return replace(reply.report, ranks=tuple(_with_value(rank, value, job) for rank, value in pairs))

    def interrupt(self) -> None:
        """Make a `run` that another thread is in, or about to enter, end with a ServerFault. After this only `close`."""
        self._closed = True
        server = self._server
        if server is not None:
            with contextlib.suppress(OSError):  # it has been closed since
                server.control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the server and every process below it, and remove its files. May be called again."""
        self._closed = True
        self._stop()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _stop(self) -> Exit | None:
        server, self._server = self._server, None
        if server is None:
            return None
        code = server.stop()
        return Exit(None, code - 128) if code > 128 else Exit(code, None)

    def _spawn(self) -> _Server:
        _check_kernel()
        directory = Path(tempfile.mkdtemp(prefix="conformance-ranks-"))
        ours, theirs = socket.socketpair()
        root = str(Path(conformance.__file__).resolve().parents[1])
        environment = os.environ | self._env
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
        command = [sys.executable, "-u", "-m", "conformance.ranks.server"]
        with theirs, (directory / "server.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(directory), str(os.getpid())],
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return _Server(process, ours, directory)

    def _exchange(self, server: _Server, message: object, what: str, timeout_s: float) -> object:
        """Send a message and return the reply. On any failure the server is stopped, and most are a ServerFault."""
        try:
            server.control.settimeout(timeout_s)
            wire.send(server.control, message)
            reply = wire.receive(server.control, timeout_s)
        except TimeoutError:
            log = tail(server.log, _LOG_LIMIT)
            self._stop()
            raise ServerFault(f"{what} did not end within {timeout_s:g} s", log=log) from None
        except (EOFError, OSError):
            log = tail(server.log, _LOG_LIMIT)
            raise ServerFault(f"the rank server died in {what}: it {self._stop()}", log=log) from None
        except BaseException:
            self._stop()
            raise
        if isinstance(reply, wire.Broken):
            raised, log = reply.raised, tail(server.log, _LOG_LIMIT)
            self._stop()
            raise ServerFault(f"{what} raised {raised.type}: {raised.message}", raised, log)
        return reply


def _with_value(rank: RankReport, value: bytes | None, job: Job) -> RankReport:
    if value is None:
        return rank
    try:
        return replace(rank, value=pickle.loads(value))
    except Exception as error:
        message = f"job {job.label!r}: the value of rank {rank.rank} cannot be unpickled here: {error}"
        raise ValueFault(message) from error


def _check_kernel() -> None:
    """Raise UsageFault where the kernel (or a container's seccomp profile) lacks pidfd_open."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise UsageFault(f"forked ranks need Linux 5.3 or newer with pidfd_open permitted: {error}") from None
