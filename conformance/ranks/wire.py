"""Messages between client and server: a length (8 bytes, big endian), then a pickle.

What belongs to the caller (preload's payload, a job's payload, a rank's value) travels as bytes within the message:
unpickled in the warm process it would import modules there, and every later rank would start with them.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from dataclasses import dataclass
from math import inf

from conformance.ranks.records import JobReport, Raised

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Preload:
    """What to call before the target of a job: "package.module:function" and its pickled argument."""

    target: str
    payload: bytes


@dataclass(frozen=True)
class Hello:
    """Client to server, once: where to import from, and what to call before the first job."""

    sys_path: tuple[str, ...]
    preload: Preload
    startup_deadline_s: float


@dataclass(frozen=True)
class Started:
    """The reply to Hello: preload's pickled return value, and the Python threads that it left running."""

    value: bytes
    threads: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """A job, its payload still pickled. With `preload` every rank is a new Python, which runs that first."""

    label: str
    target: str
    payload: bytes
    world_size: int
    deadline_s: float
    preload: Preload | None


@dataclass(frozen=True)
class Finished:
    """The reply to Request: the report without values, and each rank's pickled value (None unless it is ok)."""

    report: JobReport
    values: tuple[bytes | None, ...]


@dataclass(frozen=True)
class Broken:
    """The reply to either when preload, or the server itself, raised."""

    raised: Raised


Reply = Started | Finished | Broken


def send(sock: socket.socket, message: object) -> None:
    """Send a message whole. Raises OSError if the other side is gone."""
    data = pickle.dumps(message, protocol=5)
    sock.sendall(_LENGTH.pack(len(data)))
    sock.sendall(data)


def receive(sock: socket.socket, timeout_s: float = inf) -> object:
    """The next message. Raises EOFError if the other side is gone, TimeoutError after `timeout_s`."""
    limit = time.monotonic() + timeout_s
    (length,) = _LENGTH.unpack(_read(sock, _LENGTH.size, limit))
    return pickle.loads(_read(sock, length, limit))


def _read(sock: socket.socket, size: int, limit: float) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        # A timeout of 0 would mean non-blocking.
        sock.settimeout(None if limit == inf else max(limit - time.monotonic(), 0.001))
        count = sock.recv_into(rest)
        if not count:
            raise EOFError("the other side of the connection is gone")
        rest = rest[count:]
    return data
