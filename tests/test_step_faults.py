"""The real step through the real checks, with faults planted in the ranks: each must turn its check red, as what it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from test_plugin import ROOT, run

from conformance import parity
from conformance.backend import BackendSpec
from conformance.checks import run_check, watched
from conformance.matrix import Role, load_matrix
from conformance.ranks import JobReport
from conformance.results import CheckRecord, Precision, read_results
from conformance.runner import Case, Runner, mask_of, results_of, scales_of
from conformance.step import StepSpec

pytestmark = pytest.mark.stack

ROWS = load_matrix()
SOUND = "conformance.step:run"
ARR = "actor_rollout_ref"


class FaultyRunner(Runner):
    """A runner whose step can be exchanged between checks."""

    def __init__(self, backend: BackendSpec) -> None:
        super().__init__(backend, watched(ROWS.rows, backend.name))
        self._put_away: dict[str | None, dict[StepSpec, Future[JobReport]]] = {}

    def plant(self, fault: str | None, *, keep_baseline: bool = True) -> None:
        """From now on ranks run `faulty_steps:run_<fault>`, or the sound step for None. What another step gave is put away."""
        sound = self._put_away.setdefault(None, self._futures)
        # Faults spare runs on one rank, so those need not be repeated.
        kept = {spec: report for spec, report in sound.items() if keep_baseline and spec.world_size == 1}
        self._step_target = f"faulty_steps:run_{fault}" if fault else SOUND
        self._futures = self._put_away.setdefault(fault, kept)
        if not keep_baseline:
            self._checked.clear()

    def check(self, row: str, check: str, role: Role = "actor", variant: str = "documented") -> CheckRecord:
        precision = "float32" if check == "parity" else None
        return run_check(self, ROWS[row], role, variant, check, precision)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def started() -> Iterator[FaultyRunner]:
    runner = FaultyRunner(BackendSpec("plain", "emulated"))
    with runner:
        runner.start()
        yield runner


@pytest.fixture
def runner(started: FaultyRunner) -> Iterator[FaultyRunner]:
    yield started
    started.plant(None)


def figures_of(runner: Runner, world_size: int, overrides: tuple[str, ...]) -> list[parity.Figure]:
    """A dense actor case against the baseline, by the rule of rows that only reorder sums."""
    report = runner.step(Case("actor", "dense", world_size, overrides))
    assert report.ok, report.reason
    baseline, truth = runner.baseline("dense", "actor", "float32"), runner.truth("dense", "actor")
    numbers = parity.collect(results_of(report))
    return parity.compare(numbers, baseline, truth, mask_of("dense"), "reordered", "float32", scales_of("dense"))


# fault, row, variant, role, the quantity that must be named first
PARITY = [
    ("no_causal_mask", "tp", "documented", "actor", "log_probs"),
    ("no_causal_mask", "tp", "documented", "ref", "log_probs"),
    ("wrong_epsilon", "tp", "documented", "actor", "log_probs"),
    ("shifted_labels", "pp", "documented", "actor", "log_probs"),
    ("wrong_kv_heads", "pp", "documented", "actor", "log_probs"),
    ("dropped_mask", "pp", "documented", "actor", "loss"),
    ("wrong_cp_positions", "cp", "documented", "actor", "log_probs"),
    ("unordered_experts", "ep", "documented", "actor", "log_probs"),
    ("missing_tp_reduction", "sp", "documented", "actor", "grad_norm"),
    ("missing_dp_reduction", "distributed-optimizer", "effective", "actor", "grad_norm"),
    ("skipping_optimizer", "distributed-optimizer", "effective", "actor", "weights"),
]
CASES = sorted({(row, variant, role) for _f, row, variant, role, _q in PARITY})


@pytest.mark.parametrize(("row", "variant", "role"), CASES)
def test_sound_step_is_green(runner: FaultyRunner, row: str, variant: str, role: Role) -> None:
    record = runner.check(row, "parity", role, variant)
    assert record.outcome == "pass", record


@pytest.mark.parametrize(("fault", "row", "variant", "role", "quantity"), PARITY)
def test_wrong_numbers_fail(runner: FaultyRunner, fault: str, row: str, variant: str, role: Role, quantity: str) -> None:
    runner.plant(fault)
    record = runner.check(row, "parity", role, variant)
    assert record.outcome == "fail", record
    assert record.summary.startswith(f"{quantity} differs by"), record


@pytest.mark.parametrize("rank", [0, 1])
def test_copy_that_was_not_updated_fails(runner: FaultyRunner, rank: int) -> None:
    """Tensor-parallel ranks each have a copy of the norms; on one of them they are left out of the update."""
    runner.plant(f"stale_norms_on_rank_{rank}")
    record = runner.check("tp", "parity")
    assert record.outcome == "fail", record
    assert record.summary.startswith("weights differs by"), record
    assert "norm.weight" in record.summary


@pytest.mark.parametrize("role", ["actor", "ref"])
def test_ignored_key_has_no_effect(runner: FaultyRunner, role: Role) -> None:
    assert runner.check("tp", "engaged", role).outcome == "pass"
    runner.plant("ignored_key")
    record = runner.check("tp", "engaged", role)
    assert record.outcome == "no_effect", record
    # The numbers are right all the same: parity alone would not see it.
    assert runner.check("tp", "parity", role).outcome == "pass"


def test_ignored_key_of_the_optimizer_is_not_green(runner: FaultyRunner) -> None:
    assert runner.check("distributed-optimizer", "engaged", variant="effective").outcome == "pass"
    runner.plant("ignored_key")
    record = runner.check("distributed-optimizer", "engaged", variant="effective")
    assert record.outcome == "always_on", record  # what is ignored is `off`: it is verl's default to have it on


@pytest.mark.parametrize("fault", ["wrong_baseline", "wrong_baseline_everywhere"])
def test_wrong_baseline_ends_in_error(started: FaultyRunner, fault: str) -> None:
    try:
        started.plant(fault, keep_baseline=False)
        record = started.check("tp", "parity")
    finally:
        started.plant(None, keep_baseline=False)
    assert record.outcome == "error", record
    assert record.summary.startswith("WrongBaseline: the baseline for dense, actor is not Hugging Face's model"), record
    assert "log_probs differs by" in record.summary


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_wrong_baseline_stops_the_run_without_a_table(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "wrong.py").write_text(
        "from conformance.runner import Runner\n"
        "Runner.__init__.__kwdefaults__['step_target'] = 'faulty_steps:run_wrong_baseline_everywhere'\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    chosen = ("--row", "tp", "--row", "pp", "-k", "parity", "--backend", "plain", "--reports", str(tmp_path / "reports"))
    summary = tmp_path / "summary.md"
    done = run("-p", "wrong", *chosen, *workers, PYTHONPATH=path, GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no table, for nothing can be judged: WrongBaseline: the baseline for dense" in done.stdout
    directory = next((tmp_path / "reports" / "runs").iterdir())
    assert [path.name for path in directory.iterdir()] == ["results.jsonl"], "no table"
    assert "No table, for nothing can be judged" in summary.read_text(encoding="utf-8")
    assert "| TP |" not in summary.read_text(encoding="utf-8")
    results = read_results(directory)
    assert not results.complete
    assert len(results.checks) < 8
    assert {record.outcome for record in results.checks} == {"error"}


def test_our_own_failure_is_an_error(runner: FaultyRunner) -> None:
    runner.plant("failing_backend")
    for check in ("engaged", "parity"):
        record = runner.check("tp", check)
        assert record.outcome == "error", record
        assert record.exception is not None
        assert record.exception.owner == "conformance"


@pytest.mark.parametrize("size", [1, 2])
def test_padded_input_agrees_with_the_packed_baseline(runner: FaultyRunner, size: int) -> None:
    parallel = tuple(f"{ARR}.{role}.megatron.tensor_model_parallel_size={size}" for role in ("actor", "ref"))
    figures = figures_of(runner, size, (f"{ARR}.model.use_remove_padding=False", *parallel))
    assert all(figure.ok for figure in figures), figures


def test_equal_cases_run_once(runner: FaultyRunner) -> None:
    first = runner.step(Case("ref", "dense", 1))
    assert runner.step(Case("ref", "dense", 1)) is first
    assert (
        StepSpec("ref", "dense", 1, (), watch=runner._watch.get(("ref", "dense"), ()), checkpoint=runner._checkpoints["dense"])
        in runner._futures
    )


def test_what_fails_in_float32_alone_is_judged_as_users_run_it(runner: FaultyRunner) -> None:
    runner.plant("float32_refused")
    seen = runner.check("tp", "engaged")
    assert seen.outcome == "pass", seen
    assert seen.detail["precision"] == "bfloat16"
    alone = runner.check("tp", "parity")
    assert alone.outcome == "unsupported", alone
    assert "only in float32" in alone.summary
    assert run_check(runner, ROWS["tp"], "actor", "documented", "parity", "bfloat16").outcome == "pass"


def test_what_fails_in_every_precision_fails(runner: FaultyRunner) -> None:
    runner.plant("all_refused")
    precisions: tuple[Precision, ...] = ("float32", "bfloat16")
    records = [run_check(runner, ROWS["tp"], "actor", "documented", "parity", p) for p in precisions]
    records.append(runner.check("tp", "engaged"))
    assert [r.outcome for r in records] == ["crash"] * 3 or [r.outcome for r in records] == ["refused"] * 3, records


def test_a_rank_that_dies_in_float32_is_a_crash(runner: FaultyRunner) -> None:
    runner.plant("float32_dies")
    assert runner.check("tp", "parity").outcome == "crash"
    assert runner.check("tp", "engaged").outcome == "crash"


def test_an_exception_of_ours_is_a_record_of_ours(runner: FaultyRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> list[parity.Figure]:
        raise KeyError("planted")

    monkeypatch.setattr(parity, "compare", broken)
    record = runner.check("pp", "parity")
    assert record.outcome == "error"
    assert "KeyError" in record.summary
    assert "broken" in record.summary, "with its place"
