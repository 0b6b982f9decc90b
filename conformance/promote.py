"""Which rows may move up from Dev to Preview to Released, by a written rule, and what holds back the others.

The rule, for the documented spelling (another spelling that works promotes nothing):

- A run *shows* a row when `accepted`, `engaged` and `parity` in each precision pass under actor and ref. A role that the
  row names no evidence for (`engaged` is `unsupported`) has to pass the other two; one role at least has to engage.
- A run counts for a row when it came to its end, used MindSpeed itself, tested the `matrix.yaml` of now, is not dated in
  the future and is at most so many days old. Any other run is as good as not run.
- Preview: a run on a real or an emulated NPU shows it, and no run that counts speaks against it.
- Released: the same on a real NPU, with exactly the pinned stack, and no waiver of the gate's policy is open for the row. The
  pinned stack is `stacks/verl091-mcore016.txt` and no other: the run's header has every needed package and MindSpeed's
  branch as pinned there, and names nothing untested.

Rows only move up. What would no longer reach its status is said, and left as it is.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from conformance.errors import ConformanceError, UsageFault
from conformance.gate import Policy
from conformance.matrix import ROLES, Matrix, Row, load_matrix
from conformance.replace import replace_file
from conformance.report.text import one_line
from conformance.results import PRECISIONS, CheckRecord, Header, ResultSet, read_results
from conformance.stack import NEEDED
from conformance.stackfile import DEFAULT_STACK, read_stack
from conformance.yamlsource import load

Status = Literal["Dev", "Preview", "Released"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class Evidence:
    """One run that counts, or why it does not."""

    results: ResultSet
    name: str
    discounted: str | None


@dataclass(frozen=True)
class Proposal:
    """What the rule says of one row. `reached` is the highest status that it allows now; `blocks` is why not the next."""

    row: str
    status: Status
    reached: Status
    blocks: tuple[str, ...]

    @property
    def moves_up(self) -> bool:
        return STATUSES.index(self.reached) > STATUSES.index(self.status)


def read_evidence(paths: Sequence[Path], matrix: Path, now: datetime.datetime, max_age_days: int) -> list[Evidence]:
    """Read the runs; UsageFault for one that was interrupted or whose start is no date."""
    sha256 = hashlib.sha256(matrix.read_bytes()).hexdigest()
    found = []
    for path in paths:
        results = read_results(path)
        if not results.complete:
            raise UsageFault(f"{path}: the run was interrupted (no footer); right form: a run that came to its end")
        age = now - _started(path, results)
        header = results.header
        discounted = None
        if age < datetime.timedelta(0):
            discounted = "it is dated in the future"
        elif age > datetime.timedelta(days=max_age_days):
            discounted = f"it is {age.days} days old, more than {max_age_days}"
        elif header.matrix_sha256 != sha256:
            discounted = "it tested another matrix.yaml"
        elif header.backend != "mindspeed":
            discounted = f"its backend {header.backend} is not MindSpeed"
        found.append(Evidence(results, f"{header.device} run of {header.started}", discounted))
    return found


def _started(path: Path, results: ResultSet) -> datetime.datetime:
    try:
        started = datetime.datetime.fromisoformat(results.header.started)
    except ValueError:
        started = None
    if started is None or started.tzinfo is None:
        raise UsageFault(f"{path}: the header's key 'started' is no date; right form: ISO 8601 in UTC, 2026-12-31T00:00:00Z")
    return started


def propose(rows: Sequence[Row], evidence: Sequence[Evidence], policy: Policy | None, today: datetime.date) -> list[Proposal]:
    """The rule, for each row. Without a policy nothing is known of waivers, so nothing is Released."""
    return [_propose(row, evidence, policy, today) for row in rows]


def _propose(row: Row, evidence: Sequence[Evidence], policy: Policy | None, today: datetime.date) -> Proposal:
    mine = [e for e in evidence if row.id in e.results.header.rows]
    lacks = [(e, tuple(_lacks(row, e.results))) for e in mine if e.discounted is None]
    showing = [e for e, missing in lacks if not missing]
    blocks = [f"{e.name}: {lack.text}" for e, missing in lacks for lack in missing]
    if not showing or any(lack.fails for _, missing in lacks for lack in missing):
        return Proposal(row.id, row.status, "Dev", tuple(blocks or ["no run of it that counts"]))
    released = list(_not_released(row, showing, policy, today))
    return Proposal(row.id, row.status, "Preview" if released else "Released", (*blocks, *released))


@dataclass(frozen=True)
class _Lack:
    """What a run does not show. `fails` tells what it shows to be otherwise from what it does not answer."""

    text: str
    fails: bool


def _lacks(row: Row, results: ResultSet) -> Iterator[_Lack]:
    """What keeps a run from showing the row."""
    records = {(r.role, r.check, r.precision): r for r in results.checks if (r.row, r.variant) == (row.id, "documented")}
    engaged = [records.get((role, "engaged", None)) for role in ROLES]
    for role, record in zip(ROLES, engaged, strict=True):
        yield from _unless_passed(f"{role} accepted", records.get((role, "accepted", None)))
        if record is None or record.outcome != "unsupported":
            yield from _unless_passed(f"{role} engaged", record)
        for precision in PRECISIONS:
            yield from _unless_passed(f"{role} parity {precision}", records.get((role, "parity", precision)))
    if all(record is not None and record.outcome == "unsupported" for record in engaged):
        yield _Lack("no role has evidence that it engages", fails=False)


def _unless_passed(name: str, record: CheckRecord | None) -> Iterator[_Lack]:
    if record is None:
        yield _Lack(f"{name}: not run", fails=False)
    elif record.outcome != "pass":
        yield _Lack(f"{name}: {record.outcome}: {record.summary}", fails=record.outcome not in ("unsupported", "not_run"))


def _not_released(row: Row, showing: Sequence[Evidence], policy: Policy | None, today: datetime.date) -> Iterator[str]:
    on_npu = [e for e in showing if e.results.header.device == "npu"]
    if not on_npu:
        yield "not Released: no run on a real NPU"
    unpinned = [_off_the_stack(e.results.header) for e in on_npu]
    if on_npu and all(unpinned):
        yield f"not Released: not on the pinned stack: {', '.join(unpinned[0])}"
    if policy is None:
        yield "not Released: no policy was given (--policy), so its waivers are unknown"
        return
    for waiver in policy.waiver:
        if waiver.row == row.id:
            state = f"until {waiver.until}" if waiver.until >= today else f"until {waiver.until}, past its date"
            yield f"not Released: a waiver is open ({state}): {waiver.reason}"


def _off_the_stack(header: Header) -> tuple[str, ...]:
    """What keeps a run from being one with the pinned stack. What is installed where this is asked says nothing of it."""
    have = header.versions()
    missing = (f"{name} is not in the header" for name in (*NEEDED, "mindspeed") if name not in have)
    return tuple(dict.fromkeys((*missing, *read_stack(DEFAULT_STACK).untested(header.stack), *header.untested)))


def lines(evidence: Sequence[Evidence], proposals: Sequence[Proposal]) -> list[str]:
    """What `conformance promote` says: the runs, the moves, then each other row with what blocks it."""
    said = [one_line(f"{e.name}: {f'as good as not run: {e.discounted}' if e.discounted else 'counts'}") for e in evidence]
    said += [f"{p.row}: {p.status} -> {p.reached}" for p in proposals if p.moves_up]
    for p in proposals:
        if p.moves_up or p.status == "Released" == p.reached:
            continue
        falls = STATUSES.index(p.reached) < STATUSES.index(p.status)
        said.append(f"{p.row}: stays {p.status}" + (f", though it would not reach {p.status} today" if falls else ""))
        said += [f"  {one_line(block, 300)}" for block in p.blocks]
    return [*said, f"{sum(p.moves_up for p in proposals)} of {len(proposals)} rows may move up"]


def write(path: Path, proposals: Sequence[Proposal]) -> int:
    """Set the status of the rows that move up, and nothing else: comments, order and line ends stay. How many.

    The file is replaced in one step, after the new one was read back; UsageFault when the disk does not take it.
    """
    moves = {p.row: p.reached for p in proposals if p.moves_up}
    if not moves:
        return 0
    path = path.resolve()
    document = load(path)
    raw = path.read_bytes()
    text = raw.decode("utf-8-sig")
    before = load_matrix(path)
    at = {row.id: document.spans[("rows", i, "status")] for i, row in enumerate(before.rows)}
    for row, status in sorted(moves.items(), key=lambda move: at[move[0]], reverse=True):
        start, end = at[row]
        text = text[:start] + status + text[end:]
    bom = raw[:3] if raw.startswith(b"\xef\xbb\xbf") else b""
    wanted = _promoted(before, moves)

    def check(fresh: Path) -> None:
        if load_matrix(fresh) != wanted:
            raise ConformanceError(f"{path}: the edited matrix does not read as it should; it was left as it is")

    replace_file(path, bom + text.encode("utf-8"), check)
    return len(moves)


def _promoted(matrix: Matrix, moves: dict[str, Status]) -> Matrix:
    rows = tuple(row.model_copy(update={"status": moves.get(row.id, row.status)}) for row in matrix.rows)
    return matrix.model_copy(update={"rows": rows})
