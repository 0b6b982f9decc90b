"""Runs cases and remembers them: one rank server, the fixtures, the baseline, and each distinct case once.

A runner belongs to one pytest process. What it returns are jobs' reports and numbers; it concludes nothing about rows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, cast

from conformance import extensions, models, parity, releases
from conformance.accepted import AcceptSpec, FormResult, Question
from conformance.backend import ENVIRONMENT, BackendSpec, Imported
from conformance.errors import ConformanceError, UsageFault
from conformance.lanes import Lanes
from conformance.matrix import Role
from conformance.operators.profiles import OperatorSpec
from conformance.ranks import Job, JobReport, RankServer, ServerFault
from conformance.results import Precision, Route
from conformance.stack import broken_line
from conformance.step import StepResult, StepSpec

if TYPE_CHECKING:
    import torch

#: A case takes one to six seconds; ten times that on a loaded machine is still no hang.
DEADLINE_S = 90.0
#: Their checkpoints are always written; those of other packages when a selected row uses them.
MODELS = ("dense", "moe", "mla")
PRELOAD = "conformance.backend:preload"
_PREFIX = "conformance-models-"
USAGE_FAULT = "conformance.errors.UsageFault"


class BaselineFault(ConformanceError):
    """The baseline itself does not run: nothing can be judged against it."""


class WrongBaseline(BaselineFault):
    """The baseline is not Hugging Face's model: nothing that this run says of this stack can be trusted."""


@dataclass(frozen=True)
class Case:
    """One run of the step."""

    role: Role
    model: str
    world_size: int
    overrides: tuple[str, ...] = ()
    precision: Precision = "float32"


class Runner(contextlib.AbstractContextManager["Runner"]):
    """Start with `start`; every method after that runs what it needs and keeps the result.

    `watch`: the facts that all cases of a role and model look out for, the same for all, so that rows share their runs.
    `lanes` rank servers work side by side; `route` is the release's default if None. `step_target` is the function that ranks
    run; tests of the framework plant faults by naming another.
    """

    def __init__(
        self,
        backend: BackendSpec,
        watch: Mapping[tuple[Role, str], tuple[str, ...]] = MappingProxyType({}),
        *,
        lanes: int = 1,
        route: Route | None = None,
        step_target: str = "conformance.step:run",
    ) -> None:
        self.backend = backend
        self._watch = watch
        self.route: Route = route or releases.current().default_route
        self._step_target = step_target
        self._lanes = Lanes([RankServer(PRELOAD, backend, env=ENVIRONMENT) for _ in range(lanes)])
        _remove_leftovers()
        self._directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self._checkpoints: dict[str, str] = {}
        self._accepted: dict[tuple[int, tuple[Question, ...]], dict[Role, list[FormResult]]] = {}
        self._futures: dict[StepSpec, Future[JobReport]] = {}
        self._planned: list[Case] = []
        self._operators: dict[tuple[OperatorSpec, int], Future[JobReport]] = {}
        self._truths: dict[tuple[str, Role], parity.Numbers] = {}
        self._checked: set[tuple[str, Role]] = set()
        self._without_mindspeed: Runner | None = None
        self.imported: Imported | None = None

    def start(self) -> Imported:
        """Import the stack and write the fixtures. UsageFault when the stack cannot be imported."""
        try:
            self.imported = cast(Imported, self._lanes.start())
        except ServerFault as fault:
            raised = fault.raised
            if raised is not None and raised.type == USAGE_FAULT:
                raise UsageFault(raised.message) from None  # it is a sentence for the user already
            why = broken_line(raised) if raised else fault.message.strip().splitlines()[0]
            raise UsageFault(f"the stack cannot be imported: {why}") from fault
        names = tuple(dict.fromkeys((*MODELS, *(model for _role, model in self._watch))))
        spec = models.CheckpointSpec(names, str(self._directory))
        report = self._run(Job("fixtures", "conformance.models:write_checkpoints", spec, 1, DEADLINE_S))
        raised = report.ranks[0].raised
        if raised is not None and raised.type == USAGE_FAULT:
            raise UsageFault(raised.message)
        if not report.ok:
            raise BaselineFault(f"the fixtures cannot be written: {report.reason}")
        self._checkpoints = cast(dict[str, str], report.ranks[0].value)
        return self.imported

    def accepted(self, world_size: int, questions: tuple[Question, ...]) -> dict[Role, list[FormResult]]:
        """Answer the questions, a process for each; ConformanceError when a process does not come back."""
        if (world_size, questions) in self._accepted:
            return self._accepted[world_size, questions]
        spec = AcceptSpec(world_size, self._checkpoints["dense"], questions, self.route)
        report = self._run(Job("accepted", "conformance.accepted:run", spec, len(questions), DEADLINE_S))
        if not report.ok:
            raise ConformanceError(f"the configuration could not be tried: {report.reason}")
        answers: dict[Role, list[FormResult]] = {}
        for rank in report.ranks:
            answers.update(cast("dict[Role, list[FormResult]]", rank.value))
        self._accepted[world_size, questions] = answers
        return answers

    def plan(self, cases: Iterable[Case]) -> None:
        """Cases that will be wanted, in that order: from the first `step` on, idle lanes run ahead with them."""
        self._planned.extend(cases)

    def step(self, case: Case) -> JobReport:
        """Run one case, or return it if it has run. Raises ServerFault when the rank server fails."""
        planned, self._planned = self._planned, []
        for each in (case, *planned):
            self._submit(each)
        return self._lanes.want(self._submit(case))

    def _submit(self, case: Case) -> Future[JobReport]:
        watch = self._watch.get((case.role, case.model), ())
        checkpoint = self._checkpoints[case.model]
        spec = StepSpec(case.role, case.model, case.world_size, case.overrides, case.precision, watch, checkpoint, self.route)
        if spec not in self._futures:
            label = f"{spec.role} {spec.model} {spec.precision} on {spec.world_size}"
            job = Job(label, self._step_target, spec, spec.world_size, DEADLINE_S, self._on_hardware)
            self._futures[spec] = self._lanes.plan(job)
        return self._futures[spec]

    def plan_operator(self, spec: OperatorSpec, ranks: int) -> Future[JobReport]:
        """A family's job on so many ranks, which runs when its turn comes."""
        if (spec, ranks) not in self._operators:
            label = f"{spec.family} on {ranks}"
            job = Job(label, "conformance.operators.job:run", spec, ranks, spec.deadline_s, self._on_hardware)
            self._operators[spec, ranks] = self._lanes.plan(job)
        return self._operators[spec, ranks]

    def operator(self, spec: OperatorSpec, ranks: int) -> JobReport:
        """Run one family's job, or return it if it has run. Raises ServerFault when the rank server fails."""
        return self._lanes.want(self.plan_operator(spec, ranks))

    @property
    def _on_hardware(self) -> bool:
        """Whether ranks that use the device must be spawned.

        The warm process has called the driver by then: verl asks when it is imported whether there is a device. A fork of such a
        process is nothing that a driver promises to bear. What uses no device (fixtures, questions, the reference) is forked.
        """
        return self.imported is not None and self.imported.device == "npu"

    def _run(self, job: Job) -> JobReport:
        return self._lanes.want(self._lanes.plan(job))

    def truth(self, model: str, role: Role) -> parity.Numbers:
        """The float64 numbers of Hugging Face's model."""
        if (model, role) not in self._truths:
            spec = StepSpec(role, model, 1, (), checkpoint=self._checkpoints[model], route=self.route)
            report = self._run(Job(f"reference {model}", "conformance.reference:run", spec, 1, DEADLINE_S))
            if not report.ok:
                raise BaselineFault(f"the reference for {model} does not run: {_why(report)}")
            self._truths[model, role] = parity.collect(results_of(report))
        return self._truths[model, role]

    def baseline(self, model: str, role: Role, precision: Precision, finest: Precision = "float32") -> parity.Numbers:
        """One rank, everything off. Checked against the truth before it is used; BaselineFault or WrongBaseline if it fails.

        The check is made in the finest precision that the model can be had in: it is the one that finds faults.
        """
        report = self.step(baseline_of(model, role, precision))
        if not report.ok:
            raise BaselineFault(f"the baseline for {model}, {role}, {precision} does not run: {_why(report)}")
        numbers = parity.collect(results_of(report))
        if precision != finest:
            self.baseline(model, role, finest, finest)
        elif (model, role) not in self._checked:
            figures = parity.against_truth(numbers, self.truth(model, role), mask_of(model), precision, scales_of(model))
            wrong = [f for f in figures if not f.ok]
            if wrong:
                lines = "; ".join(f"{f.quantity} differs by {f.difference:.3g} (bound {f.bound:.3g}), {f.where}" for f in wrong)
                raise WrongBaseline(f"the baseline for {model}, {role} is not Hugging Face's model: {lines}")
            self._checked.add((model, role))
        return numbers

    @property
    def without_mindspeed(self) -> Runner:
        """The same with the plain backend, started when first asked for. ServerFault or UsageFault if that fails."""
        if self._without_mindspeed is None:
            # Other packages' models and probes work there, too; what else is watched may name MindSpeed's code.
            own = tuple(f"{family}." for family in extensions.entry_points(extensions.PROBES))
            watch = {key: tuple(fact for fact in facts if fact.startswith(own)) for key, facts in self._watch.items()}
            plain = replace(self.backend, name="plain", mindspeed=None)
            started = Runner(plain, watch, route=self.route, step_target=self._step_target)
            try:
                started.start()
            except BaseException:
                started.close()
                raise
            self._without_mindspeed = started
        return self._without_mindspeed

    def close(self) -> None:
        """End the servers and remove the fixtures; idempotent."""
        if self._without_mindspeed is not None:
            self._without_mindspeed.close()
        self._lanes.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _remove_leftovers() -> None:
    """Remove the checkpoints of runs that were killed, so that they do not pile up: their directories name the process."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = directory.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(directory, ignore_errors=True)


def baseline_of(model: str, role: Role, precision: Precision) -> Case:
    """The case that all others are compared with: one rank, no override."""
    return Case(role, model, 1, (), precision)


def results_of(report: JobReport) -> list[StepResult]:
    """The ranks' results of a job that ended well, in rank order."""
    return [cast(StepResult, rank.value) for rank in report.ranks]


def mask_of(model: str) -> torch.Tensor:
    """The response mask of the fixed batch, (B, RESPONSE) bool."""
    return models.make_batch(models.load(model)).response_mask.bool()


def scales_of(model: str) -> parity.Scales:
    """lr 0.01 over adam_eps 0.001, see `config.base_overrides`."""
    from conformance.config import ADAM_EPS, LEARNING_RATE

    return parity.Scales(models.load(model).layers, LEARNING_RATE / ADAM_EPS)


def _why(report: JobReport) -> str:
    first = report.ranks[report.failed_first] if report.failed_first is not None else None
    if first is None or first.raised is None:
        return report.reason
    return f"{first.raised.type}: {first.raised.message.strip().partition(chr(10))[0]}"
