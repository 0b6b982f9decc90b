"""The same cases by torchrun and by the warm rank server, in one run; prints both and the ratio.

    python benchmarks/launch.py [--repeats 3]

Both run `conformance.step:run` on the plain backend. A torchrun case is a whole start: interpreter, imports, process
group, step. The server's start-up is shown apart, since it is paid once.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conformance.backend import ENVIRONMENT, BackendSpec
from conformance.matrix import load_matrix
from conformance.models import CheckpointSpec
from conformance.ranks import Job, RankServer
from conformance.step import StepSpec

CASES = (("tp", "dense"), ("ep", "moe"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case; the median counts")
    repeats = parser.parse_args().repeats
    matrix = load_matrix()
    backend = BackendSpec("plain", "emulated")
    with (
        tempfile.TemporaryDirectory() as directory,
        RankServer("conformance.backend:preload", backend, env=ENVIRONMENT) as server,
    ):
        server.start()
        print(f"server start-up: {server.startup_s:.1f} s, once")
        spec = CheckpointSpec(tuple(model for _row, model in CASES), directory)
        checkpoints = server.run(Job("fixtures", "conformance.models:write_checkpoints", spec, 1, 120)).ranks[0].value
        for row, model in CASES:
            step = StepSpec("actor", model, 2, matrix[row].overrides("documented", "on"), checkpoint=checkpoints[model])
            warm = [_warm(server, step) for _ in range(repeats)]
            cold = [_cold(step, backend, Path(directory)) for _ in range(repeats)]
            a, b = statistics.median(warm), statistics.median(cold)
            print(f"{row}: warm server {a:.2f} s, torchrun {b:.2f} s, ratio {b / a:.1f} (medians of {repeats}, two ranks)")


def _warm(server: RankServer, step: StepSpec) -> float:
    report = server.run(Job("benchmark", "conformance.step:run", step, step.world_size, 120))
    assert report.ok, report.reason
    return report.wall_s


def _cold(step: StepSpec, backend: BackendSpec, directory: Path) -> float:
    payload = directory / "payload.pkl"
    payload.write_bytes(pickle.dumps((step, replace(backend))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(step.world_size)]
    began = time.monotonic()
    subprocess.run([*command, str(Path(__file__).with_name("one_rank.py")), str(payload)], check=True, capture_output=True)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
