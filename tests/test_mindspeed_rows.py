"""Real MindSpeed: what rows call per layer, and how large the differences are, kept as found by running.

A MindSpeed (or an emulation) that calls other operators, or computes otherwise, shows as a difference here, not as a silent
pass. After looking at such a difference: `PYTHONPATH=. python tests/test_mindspeed_rows.py` writes the file anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.backend import BackendSpec
from conformance.checks import run_check, watched
from conformance.matrix import load_matrix
from conformance.runner import Case, Runner, mask_of, results_of, scales_of
from conformance.stack import find_mindspeed

pytestmark = [pytest.mark.stack, pytest.mark.mindspeed]

EXPECTED = Path(__file__).parent / "expected" / "mindspeed-core_r0.16.0.json"
#: Fused rows in the spelling that works (mc2 has none, see the last test), and those that split the model.
ROWS = (
    *(("flash-attn", "documented"), ("rms-norm", "documented"), ("swiglu", "effective")),
    *(("permute", "effective"), ("gemm", "documented")),
    *((row, "documented") for row in ("tp", "pp", "ep", "sp", "cp")),
)
#: A rounding error is not the same on every processor, and no more than this times larger or smaller.
FACTOR = 4.0
#: One rounding in float32 of a number of order one: there or not by luck.
NOISE = 2.0**-23
LAYERS = 4


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(BackendSpec("mindspeed", "emulated", find_mindspeed()), watched(load_matrix().rows, "mindspeed")) as started:
        started.start()
        yield started


def observe(runner: Runner, row_id: str, variant: str) -> dict[str, dict[str, float | int]]:
    """Operator calls per layer of one actor update, on rank 0, and the difference of each parity figure."""
    from conformance import parity

    row = load_matrix()[row_id]
    report = runner.step(Case("actor", row.model, row.ranks(variant), row.overrides(variant, "on")))
    assert report.ok, report.reason
    facts = results_of(report)[0].facts
    figures = parity.compare(
        parity.collect(results_of(report)),
        runner.baseline(row.model, "actor", "float32"),
        runner.truth(row.model, "actor"),
        mask_of(row.model),
        row.parity,
        "float32",
        scales_of(row.model),
    )
    return {
        "calls per layer": {
            name.removeprefix("ops."): float(count) / LAYERS for name, count in sorted(facts.items()) if name.startswith("ops.")
        },
        "differences": {f.quantity: float(f"{f.difference:.2g}") for f in figures},
    }


@pytest.mark.parametrize(("row", "variant"), ROWS)
def test_calls_and_magnitudes_are_as_found(runner: Runner, row: str, variant: str) -> None:
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))[row]
    seen = observe(runner, row, variant)
    assert seen["calls per layer"] == expected["calls per layer"]
    assert seen["differences"].keys() == expected["differences"].keys()
    for quantity, difference in expected["differences"].items():
        low = difference / FACTOR if difference > NOISE else 0.0
        assert low <= seen["differences"][quantity] <= max(difference, NOISE) * FACTOR, quantity


def test_a_key_that_nobody_reads_has_no_effect_and_the_right_one_is_named(runner: Runner) -> None:
    record = run_check(runner, load_matrix()["permute"], "ref", "documented", "engaged", None)
    assert record.outcome == "no_effect", record
    assert "nothing reads fused_permute_and_unpermute in this step" in record.summary
    assert "like it, and read: use_fused_moe_token_permute_and_unpermute" in record.summary


def test_a_failure_within_a_traced_read_is_upstream_s(runner: Runner) -> None:
    record = run_check(runner, load_matrix()["mc2"], "ref", "documented", "engaged", None)
    assert record.outcome == "crash", record
    assert record.exception is not None
    assert record.exception.owner == "MindSpeed"
    assert record.exception.message == "'Namespace' object has no attribute 'tensor_model_parallel_size'"


def test_a_name_that_is_alike_but_read_by_nobody_is_not_offered(runner: Runner) -> None:
    record = run_check(runner, load_matrix()["distributed-optimizer"], "actor", "documented", "engaged", None)
    assert record.summary == "nothing reads use_distributed_optimizer in this step"


def main() -> None:
    """Write the expected values from a run."""
    with Runner(BackendSpec("mindspeed", "emulated", find_mindspeed()), watched(load_matrix().rows, "mindspeed")) as runner:
        runner.start()
        found = {row: observe(runner, row, variant) for row, variant in ROWS}
    EXPECTED.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
