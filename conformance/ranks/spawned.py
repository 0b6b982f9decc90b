"""A rank in a new Python: the forked process keeps its pid and becomes `python -m conformance.ranks.spawned ORDER`."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from conformance.ranks import rank
from conformance.ranks.records import RankContext
from conformance.ranks.wire import Request


def live(request: Request, context: RankContext, group: int, master_port: int, parent: int) -> NoReturn:
    """`rank.live` in a new Python, which finds its arguments in a file and imports from where this process does."""
    try:
        os.setpgid(0, group)  # before it is another program: the warm process can no longer do it then
        order = context.scratch / f"rank{context.rank}.order"
        order.write_bytes(pickle.dumps((sys.path, request, context, group, master_port, parent), protocol=5))
        os.execv(sys.executable, [sys.executable, "-u", "-m", __name__, str(order)])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(rank.EX_SOFTWARE)


def main(order: Path) -> NoReturn:
    """Live as the rank of the order."""
    path, *arguments = pickle.loads(order.read_bytes())
    sys.path[:] = path
    sys.argv[1:] = []  # upstream parses it
    rank.live(*arguments)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
