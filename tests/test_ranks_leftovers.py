"""The server's own beginning and end: whoever fails or is killed, no process, zombie or file stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks_processes import MARK, children_of, is_zombie, kill_all, marked, wait_until

from conformance.backend import BackendSpec
from conformance.ranks import Job, RankServer, ServerFault
from conformance.runner import Runner

CLIENT = """
    import sys
    from conformance.ranks import Job, RankServer
    with RankServer("ranks_targets:{preload}", ()) as server:
        server.start()
        print("started", flush=True)
        try:
            server.run(Job("long", "ranks_targets:leave_behind", ("group", "daemon", "wait"), 2, 100))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise
"""


@pytest.fixture
def mark() -> Iterator[str]:
    mark = uuid.uuid4().hex
    yield mark
    kill_all(mark)


def echo(server: RankServer) -> bool:
    return server.run(Job("echo", "ranks_targets:echo", None, 2, 10)).ok


def start_client(mark: str, directory: Path, preload: str = "preload") -> subprocess.Popen[bytes]:
    """A client in a process of its own, whose temporary files are in `directory`; a job with leftovers runs in it."""
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(directory / "site"), str(root), str(root / "tests")])
    (directory / "tmp").mkdir()
    with (directory / "out").open("wb") as out:
        client = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CLIENT.format(preload=preload))],
            env=os.environ | {MARK: mark, "PYTHONPATH": path, "TMPDIR": str(directory / "tmp")},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    if preload == "preload":  # client, supervisor, warm, and in each of two ranks itself and two processes
        assert wait_until(lambda: len(list(directory.glob("tmp/*/job1/waiting*"))) == 2)
        assert wait_until(lambda: len(marked(mark)) == 9)
    else:
        assert wait_until(lambda: len(marked(mark)) == 3)
    return client


def is_clean(mark: str, directory: Path) -> bool:
    return not marked(mark) and not list((directory / "tmp").iterdir())


@pytest.mark.parametrize("preload", ["preload", "preload_hanging"])
def test_client_killed(mark: str, tmp_path: Path, preload: str) -> None:
    with start_client(mark, tmp_path, preload) as client:
        client.kill()
    assert wait_until(lambda: is_clean(mark, tmp_path), 5)


def test_client_killed_while_a_child_of_it_holds_the_connection(mark: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    script = """
        import os, time
        from conformance.ranks import Job, RankServer
        server = RankServer("ranks_targets:preload", ())
        server.start()
        if os.fork():
            print("ready", flush=True)
        time.sleep(100)
    """
    (tmp_path / "tmp").mkdir()
    environment = {MARK: mark, "PYTHONPATH": f"{root}:{root / 'tests'}", "TMPDIR": str(tmp_path / "tmp")}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"ready\n"
        (holder,) = set(children_of(client.pid)) - {pid for pid in children_of(client.pid) if os.getsid(pid) == pid}
        client.kill()
        assert wait_until(lambda: marked(mark) == [holder] and not list((tmp_path / "tmp").iterdir()), 5)
        os.kill(holder, signal.SIGKILL)


def test_client_interrupted(mark: str, tmp_path: Path) -> None:
    with start_client(mark, tmp_path) as client:
        began = time.monotonic()
        client.send_signal(signal.SIGINT)
        client.wait(10)
    assert time.monotonic() - began < 3
    assert is_clean(mark, tmp_path)  # at once: the client waits for its server
    assert b"interrupted" in (tmp_path / "out").read_bytes()
    assert b"KeyboardInterrupt" in (tmp_path / "out").read_bytes()


@pytest.mark.parametrize(
    ("fault", "left"),
    [
        ("processes.sweep = lambda _=None: None", "processes"),  # nobody kills
        ("processes.adopt_orphans = lambda: None", "processes"),  # nobody finds the orphans
        ("import shutil; shutil.rmtree = lambda *_, **__: None", "files"),  # nobody removes the files
    ],
    ids=["no_sweep", "no_adoption", "no_removal"],
)
def test_planted_fault_in_the_supervisor_is_caught(mark: str, tmp_path: Path, fault: str, left: str) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"from conformance.ranks import processes\n{fault}\n")
    with start_client(mark, tmp_path) as client:
        client.kill()
    assert not wait_until(lambda: is_clean(mark, tmp_path), 1)
    assert bool(marked(mark)) == (left == "processes")


def test_warm_process_killed_in_a_job(mark: str) -> None:
    with RankServer("ranks_targets:preload", (), env={MARK: mark}) as server:
        warm = server.start()
        assert isinstance(warm, int)
        killer = threading.Timer(0.2, os.kill, (warm, signal.SIGKILL))
        killer.start()
        with pytest.raises(ServerFault, match=r"the rank server died in job 'doomed': it was killed by SIGKILL") as caught:
            server.run(Job("doomed", "ranks_targets:leave_behind", ("group", "daemon", "wait"), 2, 20))
        killer.join()
        assert "the warm process was killed by SIGKILL" in caught.value.log
        assert not marked(mark)
        assert echo(server)
        assert warm not in marked(mark)
    assert not marked(mark)


@pytest.mark.parametrize("who", ["warm", "supervisor"])
def test_server_killed_between_jobs_is_started_again(mark: str, who: str) -> None:
    with RankServer("ranks_targets:preload", (), env={MARK: mark}) as server:
        warm = server.start()
        assert isinstance(warm, int)
        supervisors = set(children_of(os.getpid())) & set(marked(mark))
        victim = warm if who == "warm" else supervisors.pop()
        os.kill(victim, signal.SIGKILL)
        assert wait_until(lambda: not server.alive)
        assert echo(server)
        assert echo(server)
        assert warm not in marked(mark)
    assert not marked(mark)


@pytest.mark.parametrize(
    ("preload", "message", "log"),
    [
        ("preload_raising", r"preload ranks_targets:preload_raising raised ImportError: no such stack", "said before"),
        ("absent", r"preload ranks_targets:absent raised AttributeError", ""),
        ("preload_dying", r"the rank server died in preload .*: it was killed by SIGKILL", "killed by SIGKILL"),
        ("preload_hanging", r"preload ranks_targets:preload_hanging did not end within", "in preload_hanging"),
    ],
    ids=["raising", "absent", "dying", "hanging"],
)
def test_preload_failure(mark: str, preload: str, message: str, log: str) -> None:
    with RankServer(f"ranks_targets:{preload}", env={MARK: mark}, startup_deadline_s=1.0) as server:
        with pytest.raises(ServerFault, match=message) as caught:
            server.start()
        assert log in caught.value.log
        assert log in str(caught.value)
        assert (caught.value.raised is not None) == ("raised" in message)
        if preload == "preload_raising":
            assert caught.value.raised is not None
            assert caught.value.raised.frames[-1].source == 'raise ImportError("no such stack")'
        assert wait_until(lambda: not marked(mark))  # on a machine that is busy a killed process takes its time to go
        assert not [pid for pid in children_of(os.getpid()) if is_zombie(pid)]


def test_threads_left_by_preload_are_named() -> None:
    for preload, names in {"preload_with_thread": ("lingerer",), "preload_unchanged": ()}.items():
        with RankServer(f"ranks_targets:{preload}") as server:
            server.start()
            assert server.threads == names
            assert server.startup_s > 0


def test_closed_server_stays_closed(mark: str) -> None:
    server = RankServer("ranks_targets:preload", (), env={MARK: mark})
    server.close()
    server.close()
    with pytest.raises(ServerFault, match="closed"):
        echo(server)
    with RankServer("ranks_targets:preload", (), env={MARK: mark}) as server:
        assert echo(server)  # starts by itself
        assert marked(mark)
        server.close()
        assert not marked(mark)


def test_two_servers_at_once() -> None:
    results: list[bool] = []

    def work() -> None:
        with RankServer("ranks_targets:preload", ()) as server:
            results.extend(echo(server) for _ in range(10))
            report = server.run(Job("fails", "ranks_targets:kill_rank_1", signal.SIGKILL, 2, 10))
            results.append(report.reason == "rank 1 was killed by SIGKILL")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 22


def test_env_and_import_path_reach_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "only_by_env.py").write_text("import os\ndef get(name, context): return os.environ[name]\n")
    with RankServer("ranks_targets:preload", (), env={"PYTHONPATH": str(tmp_path), MARK: "seen"}) as server:
        report = server.run(Job("env", "only_by_env:get", MARK, 1, 10))
    assert report.ranks[0].value == "seen"
    with RankServer("ranks_targets:preload", ()) as server:
        report = server.run(Job("env", "only_by_env:get", MARK, 1, 10))
    assert report.reason == "rank 0 raised ModuleNotFoundError: No module named 'only_by_env'"


@pytest.mark.stack
def test_the_checkpoints_of_a_killed_run_go_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"conformance-models-{ended.pid}-x", f"conformance-models-{os.getpid()}-x", "conformance-models-x", "other-1-x"):
        (tmp_path / name / "dense").mkdir(parents=True)
    with Runner(BackendSpec("plain", "emulated")):
        left = {path.name for path in tmp_path.iterdir()}
    assert f"conformance-models-{ended.pid}-x" not in left
    assert {f"conformance-models-{os.getpid()}-x", "conformance-models-x", "other-1-x"} < left
    assert len(left) == 4, "and the new run's own"
    assert len(list(tmp_path.iterdir())) == 3, "which goes with it"
