"""Runs cases and remembers them: one rank server, the fixtures, the baseline, and each distinct case once.

A runner belongs to one pytest process. What it returns are jobs' reports and numbers; it concludes nothing about rows.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

from conformance import models, parity
from conformance.accepted import AcceptSpec, FormResult, Question
from conformance.backend import ENVIRONMENT, BackendSpec, Imported
from conformance.config import Precision, Role
from conformance.errors import ConformanceError, UsageFault
from conformance.ranks import Job, JobReport, RankServer, ServerFault
from conformance.step import StepResult, StepSpec

if TYPE_CHECKING:
    import torch

#: A case takes one to six seconds; ten times that on a loaded machine is still no hang.
DEADLINE_S = 90.0
MODELS = ("dense", "moe", "mla")


class BaselineFault(ConformanceError):
    """The baseline itself is wrong or does not run: nothing can be judged against it."""


class Runner(contextlib.AbstractContextManager["Runner"]):
    """Start with `start`; every method after that runs what it needs and keeps the result.

    `step_target` is the function that ranks run; tests of the framework plant faults by naming another.
    """

    def __init__(self, backend: BackendSpec, *, step_target: str = "conformance.step:run") -> None:
        self.backend = backend
        self._step_target = step_target
        self._server = RankServer("conformance.backend:preload", backend, env=ENVIRONMENT)
        self._directory = Path(tempfile.mkdtemp(prefix="conformance-models-"))
        self._checkpoints: dict[str, str] = {}
        self._accepted: dict[tuple[int, tuple[Question, ...]], dict[Role, list[FormResult]]] = {}
        self._reports: dict[StepSpec, JobReport] = {}
        self._truths: dict[tuple[str, Role], parity.Numbers] = {}
        self._checked: set[tuple[str, Role]] = set()
        self.imported: Imported | None = None

    def start(self) -> Imported:
        """Import the stack and write the fixtures. UsageFault when the stack cannot be imported."""
        try:
            self.imported = cast(Imported, self._server.start())
        except ServerFault as fault:
            raised = fault.raised
            if raised is not None and raised.type == "conformance.errors.UsageFault":
                raise UsageFault(raised.message) from None  # it is a sentence for the user already
            why = f"{raised.type}: {raised.message}" if raised else fault.message
            raise UsageFault(f"the stack cannot be imported: {why.strip().splitlines()[0]}") from fault
        spec = models.CheckpointSpec(MODELS, str(self._directory))
        report = self._server.run(Job("fixtures", "conformance.models:write_checkpoints", spec, 1, DEADLINE_S))
        if not report.ok:
            raise BaselineFault(f"the fixtures cannot be written: {report.reason}")
        self._checkpoints = cast(dict[str, str], report.ranks[0].value)
        return self.imported

    def accepted(self, world_size: int, questions: tuple[Question, ...]) -> dict[Role, list[FormResult]]:
        """Answer the questions, a process for each; ConformanceError when a process does not come back."""
        if (world_size, questions) in self._accepted:
            return self._accepted[world_size, questions]
        spec = AcceptSpec(world_size, self._checkpoints["dense"], questions)
        report = self._server.run(Job("accepted", "conformance.accepted:run", spec, len(questions), DEADLINE_S))
        if not report.ok:
            raise ConformanceError(f"the configuration could not be tried: {report.reason}")
        answers: dict[Role, list[FormResult]] = {}
        for rank in report.ranks:
            answers.update(cast("dict[Role, list[FormResult]]", rank.value))
        self._accepted[world_size, questions] = answers
        return answers

    def step(
        self,
        role: Role,
        model: str,
        world_size: int,
        overrides: tuple[str, ...] = (),
        precision: Precision = "float32",
        watch: tuple[str, ...] = (),
    ) -> JobReport:
        """Run one case, or return it if it has run."""
        spec = StepSpec(role, model, world_size, overrides, precision, watch, self._checkpoints[model])
        if spec not in self._reports:
            label = f"{role} {model} {precision} on {world_size}"
            self._reports[spec] = self._server.run(Job(label, self._step_target, spec, world_size, DEADLINE_S))
        return self._reports[spec]

    def truth(self, model: str, role: Role) -> parity.Numbers:
        """The float64 numbers of Hugging Face's model."""
        if (model, role) not in self._truths:
            spec = StepSpec(role, model, 1, (), checkpoint=self._checkpoints[model])
            report = self._server.run(Job(f"reference {model}", "conformance.reference:run", spec, 1, DEADLINE_S))
            if not report.ok:
                raise BaselineFault(f"the reference for {model} does not run: {_why(report)}")
            self._truths[model, role] = parity.collect(results_of(report))
        return self._truths[model, role]

    def baseline(self, model: str, role: Role, precision: Precision) -> parity.Numbers:
        """One rank, everything off. Checked in float32 against the truth before it is used; BaselineFault if it fails."""
        report = self.step(role, model, 1, (), precision)
        if not report.ok:
            raise BaselineFault(f"the baseline for {model}, {role}, {precision} does not run: {_why(report)}")
        numbers = parity.collect(results_of(report))
        if precision == "float32" and (model, role) not in self._checked:
            truth = self.truth(model, role)
            figures = parity.compare(numbers, truth, truth, mask_of(model), "reordered", "float32", scales_of(model))
            wrong = [f for f in figures if not f.ok]
            if wrong:
                lines = "; ".join(f"{f.quantity} differs by {f.difference:.3g} (bound {f.bound:.3g}), {f.where}" for f in wrong)
                raise BaselineFault(f"the baseline for {model}, {role} is not Hugging Face's model: {lines}")
            self._checked.add((model, role))
        elif precision != "float32":
            self.baseline(model, role, "float32")
        return numbers

    def close(self) -> None:
        """End the server and remove the fixtures; idempotent."""
        self._server.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


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
