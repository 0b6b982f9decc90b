"""Rank servers working side by side, so that cases of one rank leave no core idle. What is wanted goes before what is planned."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from conformance.ranks import Job, JobReport, RankServer


class Lanes:
    """One thread and one job at a time for each server. Jobs are taken in the order in which they were planned.

    A server's own failure (ServerFault) is the outcome of its job; the next job starts that server anew.
    """

    def __init__(self, servers: Sequence[RankServer]) -> None:
        self._servers = tuple(servers)
        self._waiting: deque[tuple[Job, Future[JobReport]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, args=(server,), daemon=True) for server in self._servers]

    def start(self) -> object:
        """Start all servers, at the same time, and return what the first one's preload returned. Raises ServerFault."""
        with ThreadPoolExecutor(len(self._servers)) as pool:
            try:
                values = list(pool.map(RankServer.start, self._servers))
            except BaseException:  # also Ctrl-C: the others need not come to their end
                for server in self._servers:
                    server.interrupt()
                raise
        for thread in self._threads:
            thread.start()
        return values[0]

    def plan(self, job: Job) -> Future[JobReport]:
        """Run the job when its turn comes."""
        future: Future[JobReport] = Future()
        with self._changed:
            self._waiting.append((job, future))
            self._changed.notify()
        return future

    def want(self, future: Future[JobReport]) -> JobReport:
        """The report of a planned job, which comes next if it still waits. Raises what its server raised."""
        with self._changed:
            entry = next((e for e in self._waiting if e[1] is future), None)
            if entry is not None:
                self._waiting.remove(entry)
                self._waiting.appendleft(entry)
        return future.result()

    def close(self) -> None:
        """Drop what waits, end all servers and what they run; may be called again."""
        with self._changed:
            self._closed = True
            while self._waiting:
                self._waiting.pop()[1].cancel()
            self._changed.notify_all()
        for server in self._servers:
            server.interrupt()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        for server in self._servers:
            server.close()

    def _work(self, server: RankServer) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                job, future = self._waiting.popleft()
            try:
                future.set_result(server.run(job))
            except BaseException as error:  # whoever waits for it shall have it: this thread has nobody to raise to
                future.set_exception(error)
