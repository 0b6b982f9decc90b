"""What a family comes to in a run of the suite: its jobs' reports as one record."""

from __future__ import annotations

import math

from conformance.operators import Family
from conformance.operators.profiles import Explored, OperatorSpec, rank_counts
from conformance.ranks import JobReport
from conformance.results import Device, OperatorRecord
from conformance.runner import Runner


def run_family(runner: Runner, spec: OperatorSpec) -> OperatorRecord:
    """Run the family on each of its numbers of ranks. Raises ServerFault when the rank server fails."""
    assert runner.imported is not None
    device: Device = "npu" if runner.imported.device == "npu" else "emulated"
    return to_record(spec.family, device, [runner.operator(spec, n) for n in rank_counts(spec.family)])


def to_record(family: Family, device: Device, reports: list[JobReport]) -> OperatorRecord:
    """`fail` for a wrong number or an exception of the operator, `crash` for a job that did not come back."""
    wall_s = round(sum(r.wall_s for r in reports), 2)
    for report in reports:
        if not report.ok:
            return OperatorRecord(family, "crash", f"{report.label}: {report.reason}", 0, None, device, None, wall_s)
    found = [_explored(report) for report in reports]
    cases = sum(f.cases for f in found)
    worst = max(found, key=lambda f: f.worst_ratio)
    ratio = worst.worst_ratio if math.isfinite(worst.worst_ratio) else None
    wrong = next((f for f in found if f.falsifying is not None), None)
    if wrong is not None:
        return OperatorRecord(family, "fail", wrong.where, cases, ratio, device, wrong.falsifying, wall_s)
    summary = f"{cases} cases, worst error {worst.worst_ratio:.2g} times the expected rounding error ({worst.where})"
    return OperatorRecord(family, "pass", summary, cases, ratio, device, None, wall_s)


def _explored(report: JobReport) -> Explored:
    value = report.ranks[0].value
    assert isinstance(value, Explored)
    return value
