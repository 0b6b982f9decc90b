"""Promotion: each clause of the rule holds back what it should, and the edit changes the status and no other byte."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from result_sets import MATRIX, checks_of, result_set, with_check
from result_sets import write as write_set

from conformance import promote
from conformance.errors import ConformanceError, UsageFault
from conformance.gate import Policy, Waiver
from conformance.matrix import MATRIX as MATRIX_FILE
from conformance.matrix import Row, load_matrix
from conformance.promote import Evidence, Proposal, lines, propose, read_evidence, write
from conformance.results import Package, ResultSet
from conformance.stack import NEEDED, REPORTED
from conformance.stackfile import DEFAULT_STACK, StackFile, names, read_stack
from conformance.yamlsource import Document, load

NOW = datetime.datetime(2026, 9, 2, tzinfo=datetime.UTC)
SHA256 = hashlib.sha256(MATRIX_FILE.read_bytes()).hexdigest()
PINNED = read_stack(DEFAULT_STACK)


def versions_of(stack: StackFile) -> tuple[Package, ...]:
    """What the header of a run with exactly this stack has."""
    pinned = [Package(name, str(stack.pins[name].specifier).removeprefix("==")) for name in REPORTED if name in stack.pins]
    return (*pinned, Package("mindspeed", stack.branch or "", commit="0" * 12))


STACK = versions_of(PINNED)
EMULATED = result_set(rows=("tp",), stack=STACK)
REAL = result_set(rows=("tp",), device="npu", stack=STACK)
TP = MATRIX["tp"]


def row(status: str) -> Row:
    return TP.model_copy(update={"status": status})


def proposal(*sets: ResultSet, status: str = "Dev", policy: Policy | None = Policy(), row_: Row | None = None) -> Proposal:  # noqa: B008
    evidence = [Evidence(s, f"{s.header.device} run", None) for s in sets]
    (found,) = propose([row_ or row(status)], evidence, policy, NOW.date())
    return found


def test_preview_needs_a_run_on_any_npu_and_released_a_real_one() -> None:
    assert (proposal(EMULATED).reached, proposal(REAL).reached, proposal().reached) == ("Preview", "Released", "Dev")
    assert proposal(EMULATED).blocks == ("not Released: no run on a real NPU",)
    assert proposal(REAL, status="Preview").moves_up
    assert not proposal(EMULATED, status="Preview").moves_up


@pytest.mark.parametrize("check", ["accepted", "engaged", "parity"])
@pytest.mark.parametrize("role", ["actor", "ref"])
@pytest.mark.parametrize("outcome", ["fail", "always_on", "no_effect", "refused", "crash", "error", "not_run", "unsupported"])
def test_each_check_has_to_pass(check: str, role: Any, outcome: str) -> None:
    precision = "bfloat16" if check == "parity" else None
    found = proposal(with_check(REAL, "tp", role, check, precision, outcome=outcome, summary="why"))
    if (check, outcome) == ("engaged", "unsupported"):
        assert found.reached == "Released", "a role that the row names no evidence for"
    else:
        assert found.reached == "Dev"
        assert any(f"{role} {check}" in block and outcome in block for block in found.blocks), found.blocks


def test_a_check_without_a_record_was_not_run() -> None:
    for missing in REAL.checks:
        found = proposal(replace(REAL, checks=tuple(r for r in REAL.checks if r is not missing)))
        assert found.reached == "Dev"
        assert any(": not run" in block for block in found.blocks)


def test_a_row_that_engages_nowhere_is_not_shown() -> None:
    for role in ("actor", "ref"):
        both = with_check(REAL, "tp", role, "engaged", outcome="unsupported")
    both = with_check(both, "tp", "actor", "engaged", outcome="unsupported")
    assert proposal(both).blocks[-1].endswith("no role has evidence that it engages")


def test_another_spelling_promotes_nothing() -> None:
    swap = MATRIX["swap-optimizer"]
    only = [replace(r, outcome="pass" if r.variant == "effective" else "refused") for r in checks_of(swap)]
    assert proposal(result_set(only, rows=(swap.id,)), row_=swap).reached == "Dev"
    other_way = [replace(r, outcome="refused" if r.variant == "effective" else "pass") for r in checks_of(swap)]
    assert proposal(result_set(other_way, rows=(swap.id,)), row_=swap).reached == "Preview"


def test_one_run_that_speaks_against_it_holds_it_back_and_one_that_did_not_run_it_does_not() -> None:
    crashed = with_check(REAL, "tp", "actor", "engaged", outcome="crash")
    assert proposal(EMULATED, crashed).reached == "Dev"
    silent = with_check(REAL, "tp", "actor", "engaged", outcome="not_run")
    assert proposal(EMULATED, silent).reached == "Preview"
    assert proposal(EMULATED, result_set(rows=("pp",))).reached == "Preview"


def instead(name: str, version: str | None) -> tuple[Package, ...]:
    """The pinned stack with another version of one package, or without it."""
    rest = tuple(package for package in STACK if package.name != name)
    return rest if version is None else (*rest, Package(name, version))


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ({"stack": instead("verl", "0.9.9")}, "verl 0.9.9 (the stack pins"),
        ({"stack": instead("verl", "0.9.1.post1")}, "verl 0.9.1.post1 (the stack pins"),
        ({"stack": instead("mindspeed", "master")}, "MindSpeed branch master (the stack is tested with core_r0.16.0)"),
        ({"stack": (*instead("mindspeed", None), Package("MindSpeed", "master"))}, "MindSpeed branch master"),
        ({"stack": (*STACK, Package("torch", "2.9.0"))}, "torch 2.9.0 (the stack pins"),
        ({"stack": ()}, "torch is not in the header, verl is not in the header, megatron-core is not in the header"),
        ({"stack": (Package("verl", "0.9.1"),)}, "torch is not in the header, megatron-core is not in the header"),
        *(({"stack": instead(name, None)}, f"{name} is not in the header") for name in (*NEEDED, "mindspeed")),
        ({"untested": ("triton is installed",)}, "triton is installed"),
        *(({"stack": versions_of(read_stack(name))}, "verl 0.") for name in names() if name != DEFAULT_STACK),
    ],
)
def test_released_needs_the_pinned_stack(header: dict[str, Any], wanted: str) -> None:
    other = replace(REAL, header=replace(REAL.header, **header))
    found = proposal(other)
    assert found.reached == "Preview"
    assert found.blocks[0].startswith("not Released: not on the pinned stack: ")
    assert wanted in found.blocks[0]
    assert proposal(other, REAL).reached == "Released", "one run on the pinned stack is enough"


def test_the_rule_names_the_pinned_stack() -> None:
    assert f"`stacks/{DEFAULT_STACK}.txt`" in (promote.__doc__ or "")


def test_what_is_installed_here_does_not_judge_a_run_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.stack.installed_version", lambda _name: "3.7.1")
    assert proposal(REAL).reached == "Released"


def test_released_needs_to_know_that_no_waiver_is_open() -> None:
    assert "no policy was given" in proposal(REAL, policy=None).blocks[0]
    for until in (NOW.date(), datetime.date(2026, 1, 1)):
        policy = Policy(waiver=(Waiver(row="tp", until=until, reason="slow"),))
        assert proposal(REAL, policy=policy).reached == "Preview", "past its date it is open all the more"
    other = Policy(waiver=(Waiver(row="pp", until=NOW.date(), reason="slow"),))
    assert proposal(REAL, policy=other).reached == "Released"


def evidence(tmp_path: Path, results: ResultSet, max_age: int = 90) -> Evidence:
    (found,) = read_evidence([write_set(results, tmp_path / "set")], MATRIX_FILE, NOW, max_age)
    return found


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ({}, None),
        ({"started": "2026-06-04T00:00:00Z"}, None),
        ({"started": "2026-06-03T23:59:59Z"}, "it is 90 days old, more than 90"),
        ({"started": "2026-09-02T00:00:01Z"}, "it is dated in the future"),
        ({"backend": "plain"}, "its backend plain is not MindSpeed"),
        ({"matrix_sha256": "0" * 64}, "it tested another matrix.yaml"),
    ],
)
def test_what_makes_a_run_as_good_as_not_run(tmp_path: Path, header: dict[str, Any], wanted: str | None) -> None:
    results = result_set(**{"rows": ("tp",), "matrix_sha256": SHA256, **header})
    found = evidence(tmp_path, results)
    assert found.discounted == wanted
    (judged,) = propose([row("Dev")], [found], Policy(), NOW.date())
    assert judged.reached == ("Dev" if wanted else "Preview")
    if wanted:
        assert f"as good as not run: {wanted}" in lines([found], [judged])[0]
        assert judged.blocks == ("no run of it that counts",)


@pytest.mark.parametrize("started", ["yesterday", "", "2026-09-01", "2026-09-01T00:00:00"])
def test_a_start_that_is_no_date(tmp_path: Path, started: str) -> None:
    with pytest.raises(UsageFault, match="key 'started' is no date; right form: ISO 8601 in UTC"):
        evidence(tmp_path, result_set(started=started))


def test_an_interrupted_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="interrupted"):
        evidence(tmp_path, replace(EMULATED, footer=None))


def test_what_is_said() -> None:
    falls = proposal(status="Preview")
    assert lines([], [falls]) == [
        "tp: stays Preview, though it would not reach Preview today",
        "  no run of it that counts",
        "0 of 1 rows may move up",
    ]
    assert lines([], [proposal(EMULATED)])[0] == "tp: Dev -> Preview"
    assert lines([], [proposal(REAL, status="Released")]) == ["0 of 1 rows may move up"]
    assert "would not reach Released today" in lines([], [proposal(EMULATED, status="Released")])[0]


def up(*rows: str, reached: Any = "Released") -> list[Proposal]:
    return [Proposal(i, MATRIX[i].status, reached, ()) for i in rows]


def copy(tmp_path: Path, change: Callable[[bytes], bytes] = bytes) -> Path:
    path = tmp_path / "matrix.yaml"
    path.write_bytes(change(MATRIX_FILE.read_bytes()))
    return path


def odd_forms(raw: bytes) -> bytes:
    """The same rows, written in other ways: quotes, a comment behind, white space, another place in the row."""
    text = raw.decode()
    for new in ('status: "Preview"', "status: 'Preview'  # as the page says", "status:   Preview   # status: Preview"):
        text = text.replace("status: Preview\n", new + "\n", 1)
    return ("# status: Preview 张\n" + text).encode()


@pytest.mark.parametrize(
    "change",
    [bytes, lambda raw: raw.replace(b"\n", b"\r\n"), lambda raw: b"\xef\xbb\xbf" + raw, odd_forms],
    ids=["as it is", "crlf", "bom", "odd"],
)
def test_the_edit_changes_the_status_and_no_other_byte(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = copy(tmp_path, change)
    before = path.read_bytes()
    path.chmod(0o640)
    moved = ("tp", "ep", "mc2")
    assert write(path, up(*moved)) == 3
    after = path.read_bytes()
    statuses = {r.id: r.status for r in load_matrix(path).rows}
    assert statuses == {i: "Released" if i in moved else "Preview" for i in MATRIX.ids()}
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    changed = [(a, b) for a, b in zip(old, new, strict=True) if a != b]
    assert len(changed) == 3
    for a, b in changed:
        quoted = a.replace(b'"Preview"', b"Preview", 1).replace(b"'Preview'", b"Preview", 1)
        assert quoted.replace(b"Preview", b"Released", 1) == b
    assert path.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["matrix.yaml"]


def test_nothing_is_written_when_nothing_moves(tmp_path: Path) -> None:
    path = copy(tmp_path)
    before = path.stat()
    assert write(path, up("tp", reached="Preview") + up("pp", reached="Dev")) == 0
    assert path.stat() == before


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real = copy(tmp_path)
    (tmp_path / "link").mkdir()
    link = tmp_path / "link" / "matrix.yaml"
    link.symlink_to(real)
    write(link, up("tp"))
    assert link.is_symlink()
    assert load_matrix(real)["tp"].status == "Released"


def test_a_disk_that_does_not_take_it_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy(tmp_path)
    before = path.read_bytes()

    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            with pytest.raises(UsageFault, match="cannot be written: No space left on device"):
                write(path, up("tp"))
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["matrix.yaml"]


def test_an_edit_that_reads_back_as_something_else_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy(tmp_path)
    before = path.read_bytes()

    def off_by_a_row(file: Path) -> Document:
        document = load(file)
        return replace(
            document, spans={at: document.spans.get(("rows", 3, *at[2:]), span) for at, span in document.spans.items()}
        )

    monkeypatch.setattr("conformance.promote.load", off_by_a_row)
    with pytest.raises(ConformanceError, match="was left as it is"):
        write(path, up("tp"))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["matrix.yaml"]
