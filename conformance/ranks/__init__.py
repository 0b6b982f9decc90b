"""Fresh ranks, fast: a warm process imports the stack once and starts the ranks of each job.

    with RankServer("package.module:preload") as server:
        facts = server.start()
        report = server.run(Job("tp2-actor", "package.module:step", payload, world_size=2, deadline_s=60))

Every rank is a new process, so no state of one job reaches the next: a fork of the warm one, or a new Python that imports
the stack again (`Job.spawned`). Whatever a rank does (raise, die, hang, leave processes behind) ends in a `JobReport`, and the
next job runs. Linux only (pidfd, prctl): kernel 5.3 or newer.
"""

from conformance.ranks.client import RankServer
from conformance.ranks.records import (
    Frame,
    Job,
    JobReport,
    Raised,
    RankContext,
    RankReport,
    ServerFault,
    ValueFault,
)

__all__ = [
    "Frame",
    "Job",
    "JobReport",
    "Raised",
    "RankContext",
    "RankReport",
    "RankServer",
    "ServerFault",
    "ValueFault",
]
