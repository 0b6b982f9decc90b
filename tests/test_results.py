"""Results: what is written is read back; what is broken, interrupted or hostile is told in one line."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.errors import UsageFault
from conformance.results import (
    CHECKS,
    OUTCOMES,
    CheckRecord,
    Footer,
    Header,
    Package,
    ResultsWriter,
    UpstreamException,
    encode,
    new_run_directory,
    read_results,
)
from conformance.schema import texts

HEADER = Header(
    started="2026-09-01T00:00:00Z",
    device="emulated",
    backend="plain",
    precisions=("float32", "bfloat16"),
    stack=(Package("verl", "0.9.1"), Package("mindspeed", "0.16.0", "MindSpeed", "e4772499")),
    matrix_sha256="0" * 64,
    rows=("tp", "ep"),
    complete_selection=False,
)
CHECK = CheckRecord(
    row="tp",
    role="actor",
    variant="documented",
    check="parity",
    precision="float32",
    outcome="pass",
    summary="largest difference 4.8e-7",
    exception=UpstreamException("ValueError", "no | pipe", "a.py:1 f", "verl"),
    detail={"figures": {"log_prob": 4.8e-7}},
    wall_s=1.5,
)
VALIDATOR = jsonschema.Draft202012Validator(json.loads(texts()["results.schema.json"]))


def write(directory: Path, *checks: CheckRecord, finish: bool = True) -> Path:
    with ResultsWriter(directory, HEADER) as writer:
        for check in checks:
            writer.add(check)
        if finish:
            writer.finish("2026-09-01T00:01:00Z", 60.0)
    return writer.path


def test_a_run_is_read_back_as_written(tmp_path: Path) -> None:
    other = replace(CHECK, role="ref", exception=None)
    path = write(tmp_path / "run", CHECK, other)
    for source in (path, path.parent):
        results = read_results(source)
        assert results.header == HEADER
        assert results.checks == (CHECK, other)
        assert results.footer == Footer(checks=2, wall_s=60.0, finished="2026-09-01T00:01:00Z")
        assert results.complete


def test_an_interrupted_run_is_readable_at_any_byte_and_never_complete(tmp_path: Path) -> None:
    path = write(tmp_path / "run", CHECK, replace(CHECK, role="ref"))
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(ends[0], len(data)):
        path.write_bytes(data[:cut])
        results = read_results(path)
        assert not results.complete
        assert len(results.checks) == sum(end <= cut for end in ends[1:])
    path.write_bytes(data)
    assert read_results(path).complete


def test_each_line_is_there_before_the_next(tmp_path: Path) -> None:
    writer = ResultsWriter(tmp_path, HEADER)
    writer.add(CHECK)
    assert read_results(tmp_path).checks == (CHECK,), "a killed run keeps what it has finished"
    writer.finish("x", 0.0)


def test_an_error_in_the_run_leaves_no_footer(tmp_path: Path) -> None:
    def interrupted() -> None:
        with ResultsWriter(tmp_path, HEADER) as writer:
            writer.add(CHECK)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not read_results(tmp_path).complete


def test_earlier_results_are_never_written_over(tmp_path: Path) -> None:
    path = write(tmp_path / "run", CHECK)
    before = path.read_bytes()
    with pytest.raises(UsageFault, match="there are results already; right form: a new directory"):
        ResultsWriter(tmp_path / "run", HEADER)
    assert path.read_bytes() == before
    first, second = (new_run_directory(tmp_path / "runs", HEADER.started) for _ in range(2))
    assert (first.name, second.name) == ("20260901T000000Z", "20260901T000000Z-2")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageFault, match="cannot write results: Not a directory"):
        ResultsWriter(tmp_path / "file" / "run", HEADER)
    with pytest.raises(UsageFault, match="cannot make a directory for results: Not a directory"):
        new_run_directory(tmp_path / "file" / "runs", HEADER.started)


FULL_DISK = """
import resource, sys
sys.path.insert(0, "tests")
from pathlib import Path
from conformance.errors import UsageFault
from conformance.results import ResultsWriter
from test_results import CHECK, HEADER
from dataclasses import replace
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))  # the kernel refuses what goes beyond, as on a full disk
try:
    with ResultsWriter(Path(sys.argv[1]), HEADER) as writer:
        for i in range(100):
            writer.add(replace(CHECK, variant=f"v{i}"))
except UsageFault as fault:
    print(fault)
    sys.exit(fault.exit_code)
"""


def test_a_full_disk_is_one_line_and_what_was_written_stays_readable(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (2, "")
    assert re.fullmatch(r".*results\.jsonl: cannot write results: File too large\n", done.stdout)
    results = read_results(tmp_path)
    assert not results.complete
    assert len(results.checks) > 2


def test_figures_that_json_lacks_become_text() -> None:
    figures: dict[str, Any] = {"a": math.nan, "b": [math.inf, -math.inf], "c": (1.0,), "d": {"e": math.nan}}
    line = encode(replace(CHECK, detail=figures, wall_s=1.0))
    assert json.loads(line)["detail"] == {"a": "nan", "b": ["inf", "-inf"], "c": [1.0], "d": {"e": "nan"}}


def test_hostile_text_stays_on_one_line(tmp_path: Path) -> None:
    text = "a\nb\r\u2028\x00\x1b[31m|`<script>"
    check = replace(CHECK, summary=text)
    assert read_results(write(tmp_path / "a", check)).checks == (check,)
    surrogate = replace(CHECK, summary="\udcff")
    assert read_results(write(tmp_path / "b", surrogate)).checks[0].summary == "?"


def lines(*items: Any) -> bytes:
    return b"".join(item if isinstance(item, bytes) else json.dumps(item).encode() + b"\n" for item in items)


HEAD: dict[str, Any] = json.loads(encode(HEADER))
BODY: dict[str, Any] = json.loads(encode(CHECK))
FOOT: dict[str, Any] = {"kind": "footer", "checks": 1, "wall_s": 1, "finished": "x"}


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", r":1: no header"),
        (b"\n", r":1: Invalid JSON"),
        (lines(BODY), r":1: no header"),
        (lines(HEAD, b"{\n"), r":2: Invalid JSON"),
        (lines(HEAD, b"[1]\n"), r":2: .*right form: results\.schema\.json"),
        (lines(HEAD, b"\xff\n"), r":2: Invalid JSON"),
        (lines(HEAD, b"[" * 100_000 + b"\n"), r":2: Invalid JSON: recursion limit"),
        (lines(HEAD, b'"' + b"x" * 1_000_001 + b'"\n'), r":2: longer than 1000000 bytes"),
        (lines(HEAD, {**BODY, "outcome": "green"}), r":2: key 'outcome': Input should be 'pass'"),
        (lines(HEAD, {**BODY, "colour": "green"}), r":2: key 'colour': "),
        (lines(HEAD, {**BODY, "wall_s": "1"}), r":2: key 'wall_s': "),
        (lines(HEAD, {**BODY, "detail": []}), r":2: key 'detail': "),
        (lines(HEAD, {**BODY, "exception": {"type": "E"}}), r":2: key 'exception\.message': "),
        (lines({**HEAD, "schema_version": 2}), r":1: key 'schema_version': Input should be 1"),
        (lines(HEAD, {**BODY, "row": "cp"}), r":2: row 'cp' is not among the header's rows"),
        (lines(HEAD, BODY, BODY), r":3: a second record of one check"),
        (lines(HEAD, HEAD), r":2: a header among the checks"),
        (lines(HEAD, BODY, FOOT, {**BODY, "role": "ref"}), r":3: a footer among the checks"),
        (lines(HEAD, FOOT), r":2: the footer counts 1 checks, there are 0"),
    ],
)
def test_a_broken_file_is_told_in_one_line(tmp_path: Path, data: bytes, wanted: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(data)
    with pytest.raises(UsageFault) as caught:
        read_results(path)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert re.match(wanted, message.removeprefix(str(path))), message


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="cannot be read: No such file"):
        read_results(tmp_path)


RECORDS = st.builds(
    CheckRecord,
    row=st.sampled_from(HEADER.rows),
    role=st.sampled_from(["actor", "ref"]),
    variant=st.text(max_size=5),
    check=st.sampled_from(CHECKS),
    precision=st.sampled_from([None, "float32", "bfloat16"]),
    outcome=st.sampled_from(OUTCOMES),
    summary=st.text(max_size=10),
    exception=st.none() | st.builds(UpstreamException, *[st.text(max_size=5)] * 4),
    detail=st.dictionaries(st.text(max_size=3), st.none() | st.floats() | st.lists(st.booleans()), max_size=2),
    wall_s=st.floats(0, 1e6),
)  # fmt: skip


@given(RECORDS)
def test_every_line_written_satisfies_the_published_schema(record: CheckRecord) -> None:
    VALIDATOR.validate(json.loads(encode(record)))


@pytest.mark.parametrize("key", list(BODY))
def test_the_published_schema_refuses_what_the_reader_refuses(tmp_path: Path, key: str) -> None:
    VALIDATOR.validate(BODY)
    for number, line in enumerate([{**BODY, key: {"x": 1, "y": object}}, {k: v for k, v in BODY.items() if k != key}]):
        text = json.dumps(line, default=lambda _: 1)
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(lines(HEAD, text.encode() + b"\n"))
        readable = True
        try:
            read_results(path)
        except UsageFault:
            readable = False
        assert VALIDATOR.is_valid(json.loads(text)) == readable, line


def test_a_reports_directory_with_one_published_run(tmp_path: Path) -> None:
    write(tmp_path / "reports" / "stack")
    assert read_results(tmp_path / "reports").complete
    write(tmp_path / "reports" / "other")
    with pytest.raises(UsageFault, match="several stacks; right form: one of other, stack"):
        read_results(tmp_path / "reports")


def test_a_pipe_is_no_results(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "results.jsonl")
    with pytest.raises(UsageFault, match="not a file; right form"):
        read_results(tmp_path)
