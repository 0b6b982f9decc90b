"""The three checks of one spelling of a row under one role, each ending in one CheckRecord.

What differs between rows is data in `matrix.yaml`; nothing here knows a row.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from conformance import blame, engaged, parity, verdict
from conformance.accepted import FormResult, Question
from conformance.errors import ConformanceError, UsageFault
from conformance.extensions import ExtensionFault
from conformance.matrix import OVERRIDES, ROLES, Evidence, Role, Row, Side, own_families
from conformance.probes import Facts
from conformance.ranks import JobReport
from conformance.results import Check, CheckRecord, Outcome, Precision, UpstreamException
from conformance.runner import Case, Runner, WrongBaseline, baseline_of, mask_of, results_of, scales_of
from conformance.stack import BackendName
from conformance.verdict import FAILURES

#: In a record's detail: after this the run stops, and no table is made of it.
STOPS = "stops the run"


def run_check(runner: Runner, row: Row, role: Role, variant: str, check: Check, precision: Precision | None) -> CheckRecord:
    """Run one check to a record. Our own failures become outcome `error`; usage faults go through."""
    began = time.perf_counter()
    bodies: dict[Check, Callable[..., _Conclusion]] = {"accepted": _accepted, "engaged": _engaged, "parity": _parity}
    arguments = (runner, row, role, variant) + ((precision,) if check == "parity" else ())
    try:
        conclusion = _not_run(runner, row, check) or bodies[check](*arguments)
    except UsageFault:
        raise
    except Exception as fault:  # whatever it is, it is ours, and this check has a record that says so
        place = "" if isinstance(fault, ConformanceError) else f" ({blame.place_of(fault)})"
        conclusion = _Conclusion("error", f"{type(fault).__name__}: {fault}".splitlines()[0] + place)
        if isinstance(fault, WrongBaseline):
            conclusion.detail[STOPS] = True
    record = CheckRecord(
        row.id, role, variant, check, precision, conclusion.outcome, conclusion.summary, conclusion.exception, conclusion.detail
    )  # fmt: skip
    detail = record.detail | _with_plain(runner, row, record)
    return replace(record, detail=detail, wall_s=time.perf_counter() - began)


def _with_plain(runner: Runner, row: Row, record: CheckRecord) -> dict[str, Any]:
    """A failure with MindSpeed is tried without it, where that can be: then it is known whose it is."""
    if (
        record.check == "accepted"  # never reaches either backend
        or record.outcome not in FAILURES
        or runner.backend.name != "mindspeed"
        or not _runs(row, "plain")
    ):
        return {}
    try:
        without = runner.without_mindspeed
    except ConformanceError as fault:
        return {"with_plain": f"error: {fault}".splitlines()[0]}
    plain = run_check(without, row, record.role, record.variant, record.check, record.precision)
    return {"with_plain": f"{plain.outcome}: {plain.summary}", "whose": verdict.blame(record, plain)}


class _Conclusion:
    """Outcome, one line, and what stands behind it."""

    def __init__(self, outcome: Outcome, summary: str, exception: UpstreamException | None = None, **detail: Any) -> None:
        self.outcome, self.summary, self.exception, self.detail = outcome, summary[:500], exception, detail


def how_to_run(row: Row) -> str:
    return f"MINDSPEED_HOME=/path/to/MindSpeed python -m pytest conformance --row {row.id}"


def _not_run(runner: Runner, row: Row, check: Check) -> _Conclusion | None:
    if check != "accepted" and not _runs(row, runner.backend.name):
        how = how_to_run(row)
        return _Conclusion("not_run", f"only MindSpeed has this, and this run is plain: {how}", how_to_run=how)
    return None


def _accepted(runner: Runner, row: Row, role: Role, variant: str) -> _Conclusion:
    forms = runner.accepted(row.ranks(variant), tuple(_question(row, r, variant) for r in ROLES))[role]
    working = [f for f in forms if f.works]
    detail = [_form_detail(f) for f in forms]
    traps = [f"{f.form} drops inherited {', '.join(f.lost)}" for f in working if f.lost]
    if working:
        names = " or ".join(f.form for f in working)
        summary = f"written {names}" + (f"; trap: {'; '.join(traps)}" if traps else "")
        return _Conclusion("pass", summary, forms=detail)
    last = next((f.raised for f in reversed(forms) if f.raised is not None), None)
    if last is None:
        lost = ", ".join(forms[-1].missing)
        return _Conclusion("no_effect", f"composes, but {lost} does not reach {role}'s engine", forms=detail)
    kind = blame.kind_of(last, [s.key for s in row.spelling(variant).settings])
    outcome: Outcome = "error" if kind == "error" else "refused"
    exception = blame.record_of(last)
    return _Conclusion(outcome, blame.text_of(exception), exception, forms=detail)


def _question(row: Row, role: Role, variant: str) -> Question:
    spelling = row.spelling(variant)
    own = any(s.key.startswith(f"actor_rollout_ref.{role}.") for s in spelling.settings)
    return Question(
        role=role,
        settings=tuple((s.key, s.on) for s in spelling.settings_for(role)),
        given=row.overrides(variant, "absent"),
        inherited=() if own else tuple((s.key, s.on) for s in spelling.settings),
    )


def _form_detail(form: FormResult) -> dict[str, Any]:
    if form.raised is not None:
        exception = blame.record_of(form.raised)
        outcome, summary = "refused", blame.text_of(exception)
    elif form.missing:
        outcome, summary = "no_effect", f"reaches no engine: {', '.join(form.missing)}"
    else:
        outcome, summary = "pass", f"drops inherited {', '.join(form.lost)}" if form.lost else "taken"
    return {"form": form.form, "outcome": outcome, "overrides": list(form.overrides), "summary": summary}


def _engaged(runner: Runner, row: Row, role: Role, variant: str) -> _Conclusion:
    evidence = row.evidence_for(variant, role)
    if not evidence:
        return _Conclusion("unsupported", f"the row names no evidence for {role}: it concerns the other role only")
    backend = runner.backend.name
    reads = _reads(row, variant, backend)
    precision = _judged_in(runner, row, role, variant)
    on, off, absent = map(runner.step, cases_of(row, role, variant, "engaged", precision, backend))
    if not on.ok:
        return _failed(on, row, variant)
    detail: dict[str, Any] = {"overrides": list(row.overrides(variant, "on")), "precision": precision}
    on_facts = _facts(on, evidence)
    if reads:
        detail["readers"] = results_of(on)[0].readers
    if not off.ok:
        conclusion = _failed(off, row, variant)
        if conclusion.outcome == "error":
            return conclusion
        held = engaged.holds_on(evidence, on_facts)
        outcome: Outcome = "always_on" if held else "fail"
        why = "cannot be switched off" if held else "the evidence is missing, and off fails as well"
        return _Conclusion(outcome, f"{why}: {conclusion.summary}", conclusion.exception, **detail)
    off_facts = _facts(off, evidence)
    judgement = engaged.judge(evidence, on_facts, off_facts)
    detail["evidence"] = list(judgement.lines)
    detail["absent"] = _absent(absent, evidence, on_facts, off_facts)
    unread = [fact.partition(".")[2] for fact in reads if not any(facts.get(fact) for facts in on_facts)]
    if judgement.outcome in ("always_on", "no_effect") and unread and len(unread) == len(reads):
        # Set, stored and read by nobody: the key has no effect, also where what it promises runs anyway.
        near = [name for key in unread for name in results_of(on)[0].near.get(key, [])[:1]]
        hint = f"; like it, and read: {', '.join(near)}" if near else ""
        return _Conclusion("no_effect", f"nothing reads {', '.join(unread)} in this step{hint}", **detail)
    return _Conclusion(judgement.outcome, judgement.summary, **detail)


def _judged_in(runner: Runner, row: Row, role: Role, variant: str) -> Precision:
    """The first of the row's precisions in which the run with the key on ends well; the first of all if it does in none.

    float32 is this suite's choice, for it finds faults: verl's users cannot have it. What upstream raises in it alone is judged
    as they run it. A rank that dies or hangs is no such thing, whatever the precision.
    """
    for precision in row.precisions:
        report = runner.step(cases_of(row, role, variant, "parity", precision, runner.backend.name)[0])
        if report.ok:
            return precision
        if report.status != "raised" or blame.failure_of(report, ())[0] == "error":
            break
    return row.precisions[0]


def cases_of(row: Row, role: Role, variant: str, check: Check, precision: Precision, backend: BackendName) -> tuple[Case, ...]:
    """The steps that a check looks at: on, off and absent for engaged; on and the baseline for parity; () if at none."""

    def case(side: Side) -> Case:
        return Case(role, row.model, row.ranks(variant), row.overrides(variant, side), precision)

    if not _runs(row, backend):
        return ()
    if check == "engaged" and row.evidence_for(variant, role):
        return case("on"), case("off"), case("absent")
    if check == "parity" and precision in row.precisions:
        return case("on"), baseline_of(row.model, role, precision)
    return ()


def watched(rows: Iterable[Row], backend: BackendName) -> dict[tuple[Role, str], tuple[str, ...]]:
    """What the cases of a role and model look out for on behalf of these rows' evidence, and whether their keys are read."""
    found: dict[tuple[Role, str], set[str]] = {}
    for row in rows:
        if not _runs(row, backend):
            continue
        for role, variant in itertools.product(ROLES, row.variant_names):
            named = {e.fact for e in row.evidence_for(variant, role)} | set(_reads(row, variant, backend))
            mine = {f for f in named if f.startswith(_watched_families())}
            found.setdefault((role, row.model), set()).update(mine)
    return {key: tuple(sorted(facts)) for key, facts in found.items()}


def _runs(row: Row, backend: BackendName) -> bool:
    return row.implemented_by != "mindspeed" or backend == "mindspeed"


def _reads(row: Row, variant: str, backend: BackendName) -> tuple[str, ...]:
    """`reads.<key>` of the settings that go through override_transformer_config."""
    keys = [s.key for s in row.spelling(variant).settings if OVERRIDES in s.key]
    return tuple(f"reads.{key.rpartition('.')[2]}" for key in keys) if backend == "mindspeed" else ()


def _watched_families() -> tuple[str, ...]:
    return ("calls.", "config.", "reads.", "patched.", *(f"{family}." for family in own_families()))


def _facts(report: JobReport, evidence: Iterable[Evidence]) -> list[Facts]:
    """The ranks' facts; ExtensionFault when a probe that the evidence rests on failed: then nothing can be said."""
    families = {item.fact.partition(".")[0] for item in evidence}
    for result in results_of(report):
        for family in sorted(families & result.probe_faults.keys()):
            raise ExtensionFault(f"{result.probe_faults[family]} on rank {result.rank}")
    return [result.facts for result in results_of(report)]


def _absent(absent: JobReport, evidence: Iterable[Evidence], on: list[Facts], off: list[Facts]) -> str:
    """What the default does: with the key absent the run is like on, like off, like neither, or fails."""
    if not absent.ok:
        return "fails"
    facts = _facts(absent, evidence)
    if not engaged.differing(facts, off):
        return "as off" if engaged.differing(facts, on) else "as on and off"
    return "as on" if not engaged.differing(facts, on) else "like neither"


def _parity(runner: Runner, row: Row, role: Role, variant: str, precision: Precision) -> _Conclusion:
    if precision not in row.precisions:
        return _Conclusion("unsupported", f"the row is not for {precision}: see its note")
    report = runner.step(cases_of(row, role, variant, "parity", precision, runner.backend.name)[0])
    if not report.ok:
        failed = _failed(report, row, variant)
        judged_in = _judged_in(runner, row, role, variant)
        if row.precisions.index(precision) >= row.precisions.index(judged_in) or failed.outcome == "error":
            return failed
        why = f"only in {precision}, which verl's own validation refuses"
        return _Conclusion("unsupported", f"{why}: {failed.summary}", failed.exception, **failed.detail)
    baseline = runner.baseline(row.model, role, precision, row.precisions[0])
    truth = runner.truth(row.model, role)
    results = results_of(report)
    fault = next((r.export_fault for r in results if r.export_fault is not None), None)
    if fault is not None:
        exception = blame.record_of(fault)
        kind = blame.kind_of(fault, ())
        return _Conclusion(kind, f"exporting the weights: {blame.text_of(exception)}", exception)
    figures = parity.compare(
        parity.collect(results), baseline, truth, mask_of(row.model), row.parity, precision, scales_of(row.model)
    )
    detail: dict[str, Any] = {
        "figures": {f.quantity: f"{f.difference:.3g} (bound {f.bound:.3g}) at {f.where}" for f in figures},
        "measured": {f.quantity: f.measured() for f in figures},
    }
    wrong = [f for f in figures if not f.ok]
    if wrong:
        worst = wrong[0]
        summary = f"{worst.quantity} differs by {worst.difference:.3g} (bound {worst.bound:.3g}), {worst.where}"
        return _Conclusion("fail", summary, **detail)
    nearest = max(figures, key=parity.share)
    return _Conclusion("pass", f"{nearest.quantity} within {nearest.difference:.3g}, bound {nearest.bound:.3g}", **detail)


def _failed(report: JobReport, row: Row, variant: str) -> _Conclusion:
    keys = [s.key for s in row.spelling(variant).settings]
    kind, summary, exception = blame.failure_of(report, keys)
    detail: dict[str, Any] = {}
    if exception is None:
        detail["stacks"] = [f"rank {r.rank}: {r.stacks[-4000:]}" for r in report.ranks if r.stacks]
    return _Conclusion(kind, summary, exception, **detail)
