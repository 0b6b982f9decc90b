"""`python -m conformance.ranks.server FD DIRECTORY CLIENT_PID`: two processes, started by `RankServer`.

The *supervisor* stays small. It waits for the client to go away, however that ends, then kills every process below it
and removes the directory. Its child, the *warm* process, imports the stack and forks ranks; it may be deep in C code,
crash or be killed: that is why it does not guard itself.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from conformance.ranks import jobs, processes, rank, wire
from conformance.ranks.capture import capture


def main(fd: int, directory: Path, client: int) -> int:
    """Start the warm process and supervise it; returns its exit code, or 128 plus the signal that killed it."""
    # Ctrl-C is for the client. SIGUSR1 asks a rank for its stacks, which may come before it can answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    processes.adopt_orphans()
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    supervisor = os.getpid()
    warm = os.fork()
    if warm == 0:
        _be_warm(control, directory, supervisor)
    try:
        return _supervise(control, client, warm)
    finally:
        processes.sweep()
        shutil.rmtree(directory, ignore_errors=True)


def _supervise(control: socket.socket, client: int, warm: int) -> int:
    """Return when the client is gone. If the warm process ends first: clean up after it and tell the client."""
    try:
        client_fd, warm_fd = os.pidfd_open(client), os.pidfd_open(warm)
    except ProcessLookupError:
        return 0
    if os.getppid() != client:  # it had ended, and its pid has gone to another process
        return 0
    poller = select.poll()
    poller.register(control, select.POLLRDHUP)
    # The socket is not enough: a process forked by the client would hold it open.
    poller.register(client_fd, select.POLLIN)
    poller.register(warm_fd, select.POLLIN)
    if {fd for fd, _ in poller.poll()} != {warm_fd}:
        return 0
    end = processes.exit_of(warm)
    processes.sweep()
    print(f"the warm process {end}", file=sys.stderr, flush=True)
    control.shutdown(socket.SHUT_WR)
    # The directory has the log, which the client wants to read. Take what it sends, lest it blocks in sending.
    poller.unregister(warm_fd)
    poller.modify(control, select.POLLIN)
    while client_fd not in {fd for fd, _ in poller.poll()} and control.recv(65536):
        pass
    return 128 + end.signal if end.signal is not None else end.code or 0


def _be_warm(control: socket.socket, directory: Path, supervisor: int) -> NoReturn:
    code = 1
    try:
        processes.die_with_parent(supervisor)
        processes.adopt_orphans()
        os.register_at_fork(after_in_child=control.close)
        sys.argv[1:] = []  # upstream parses it
        _serve(control, directory)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(control: socket.socket, directory: Path) -> None:
    try:
        hello = wire.receive(control)
        assert isinstance(hello, wire.Hello)
        wire.send(control, _start(hello))
        spared = processes.children()
        number = 0
        while True:
            request = wire.receive(control)
            assert isinstance(request, wire.Request)
            number += 1
            wire.send(control, _run(request, directory / f"job{number}", spared))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the client is gone


def _start(hello: wire.Hello) -> wire.Reply:
    sys.path[:] = hello.sys_path
    # A native thread, and one that is gone before the first fork.
    faulthandler.dump_traceback_later(hello.startup_deadline_s)
    try:
        value = pickle.dumps(rank.preload(hello.preload), protocol=5)
    except BaseException as error:
        return wire.Broken(capture(error))
    finally:
        faulthandler.cancel_dump_traceback_later()
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, all pages of the stack's objects
    threads = threading.enumerate()
    return wire.Started(value, tuple(thread.name for thread in threads if thread is not threading.main_thread()))


def _run(request: wire.Request, scratch: Path, spared: frozenset[int]) -> wire.Reply:
    try:
        return jobs.run_job(request, scratch, spared)
    except Exception as error:  # such as no process left to fork
        return wire.Broken(capture(error))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
