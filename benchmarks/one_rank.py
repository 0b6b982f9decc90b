"""One rank of a case under torchrun: what the rank server saves. Used by `launch.py`."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conformance.backend import ENVIRONMENT, preload
from conformance.ranks import RankContext

if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    step, backend = pickle.loads(Path(sys.argv[1]).read_bytes())
    preload(backend)
    from conformance.step import run

    rank = int(os.environ["RANK"])
    with tempfile.TemporaryDirectory() as scratch:
        run(step, RankContext(rank, step.world_size, "env://", Path(scratch)))
