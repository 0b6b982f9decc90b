"""A family as a job of the rank server: fresh processes, the device that the server has imported, hypothesis inside.

With several ranks the first draws the cases and sends each to the others; every rank judges its own part.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist

from conformance.operators import COLLECTIVE, Family
from conformance.operators.catalogue import CATALOGUE
from conformance.operators.explore import explore
from conformance.operators.profiles import Explored, OperatorSpec, Profile, rank_counts
from conformance.operators.surface import Surface, active
from conformance.operators.tolerance import Lost, Worst, Wrong, judge
from conformance.ranks import Job, RankContext, RankServer

#: A rank that waits longer for the others in the operator under test has lost them.
_PATIENCE = datetime.timedelta(seconds=20)
#: A rank that failed before the collective waits here until the others have lost theirs.
_CONTROL_PATIENCE = 4 * _PATIENCE


def run(spec: OperatorSpec, context: RankContext) -> Explored | None:
    """Explore the family, or check the one case; rank 0 returns what came of it."""
    surface = active(context.rank)
    if spec.family not in COLLECTIVE:
        entry = CATALOGUE[spec.family]
        return _explored(spec, lambda case: judge(entry.check(case, surface)), surface)
    dist.init_process_group(
        "hccl", init_method=context.rendezvous, rank=context.rank, world_size=context.world_size, timeout=_PATIENCE
    )
    control = dist.new_group(backend="gloo", timeout=_CONTROL_PATIENCE)
    world: Any = dist.group.WORLD
    backend = world._get_backend(torch.device("npu"))
    named = replace(surface, communicator=backend.get_hccl_comm_name(context.rank))
    together = _Together(spec.family, named, context, control)
    try:
        if context.rank:
            together.follow()
            return None
        found = _explored(spec, together.check, named)
        together.dismiss()
        return found
    finally:
        dist.destroy_process_group()


def _explored(spec: OperatorSpec, check: Callable[[Any], Worst], surface: Surface) -> Explored:
    if spec.case is None:
        return explore(spec.family, spec.profile, check, spec.home, kernels=bool(surface.kernels))
    worst = check(spec.case)
    return Explored(1, worst.ratio, worst.name)


@dataclass(frozen=True)
class _Fault:
    """Why a rank failed. `raised`: by an exception of the operator, after which the collective may be out of step."""

    sentence: str
    raised: bool


_Answer = Worst | _Fault


class _Together:
    """One case on all ranks at a time."""

    def __init__(self, family: Family, surface: Surface, context: RankContext, control: Any) -> None:
        self._check = CATALOGUE[family].check
        self._surface = surface
        self._context = context
        self._control = control

    def check(self, case: Any) -> Worst:
        """On rank 0: have every rank check the case; the worst of all, Wrong if any is."""
        dist.broadcast_object_list([case], 0, group=self._control)
        return self._judged(case)

    def dismiss(self) -> None:
        """On rank 0: tell the others that there are no more cases."""
        dist.broadcast_object_list([None], 0, group=self._control)

    def follow(self) -> None:
        """On the other ranks: check what rank 0 sends."""
        while True:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, 0, group=self._control)
            if box[0] is None:
                return
            try:
                self._judged(box[0])
            except Wrong:
                continue  # rank 0 has it too, and concludes

    def _judged(self, case: Any) -> Worst:
        mine: _Answer
        try:
            mine = judge(self._check(case, self._surface, self._context.rank, self._context.world_size))
        except Wrong as fault:
            mine = _Fault(str(fault), raised=False)
        except Exception as fault:
            mine = _Fault(f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}", raised=True)
        everyone: list[Any] = [None] * self._context.world_size
        dist.all_gather_object(everyone, mine, group=self._control)
        return _together(everyone)


def _together(everyone: Sequence[_Answer]) -> Worst:
    """The worst of all ranks. Wrong if any failed; Lost unless those that raised are all, and for one reason."""
    faults = [a for a in everyone if isinstance(a, _Fault)]
    if not faults:
        return max(cast("list[Worst]", everyone), key=lambda w: w.ratio)
    sentences: dict[str, list[str]] = {}
    for rank, answer in enumerate(everyone):
        if isinstance(answer, _Fault):
            sentences.setdefault(answer.sentence, []).append(str(rank))
    told = "; ".join(f"rank {', '.join(ranks)} of {len(everyone)}: {words}" for words, ranks in sentences.items())
    raised = [f for f in faults if f.raised]
    if raised and (len(raised) < len(everyone) or len(sentences) > 1):
        raise Lost(told)
    raise Wrong(told)


def preload(_: None) -> str:
    """Import torch_npu, the real one where there is one; the device's name."""
    from conformance import npu

    device = npu.activate("auto", mindspeed=False)
    torch.set_num_threads(1)
    return device.name


def replay(family: Family, case: Any) -> None:
    """Check one case in processes of its own; AssertionError with the reason when it is wrong."""
    spec = OperatorSpec(family, Profile(1, True), "", case)
    with RankServer("conformance.operators.job:preload", None) as server:
        on_hardware = server.start() == "npu"
        for ranks in rank_counts(family):
            job = Job(f"replay {family}", "conformance.operators.job:run", spec, ranks, 120.0, spawned=on_hardware)
            report = server.run(job)
            assert report.ok, report.reason
