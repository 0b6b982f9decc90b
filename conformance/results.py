"""One directory a run: `results.jsonl`, a header, a record per check or operator as it finishes, and a footer.

A file without a footer is an interrupted run: it is readable and never complete. Every line is checked when read,
against the dataclasses below, from which `conformance/schema/results.schema.json` is generated.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, ClassVar, Literal, get_args

from packaging.utils import canonicalize_name
from pydantic import ConfigDict, Field, JsonValue, Strict, TypeAdapter, ValidationError

from conformance.errors import UsageFault
from conformance.matrix import Role
from conformance.operators import Family

SCHEMA_VERSION: Literal[1] = 1
FILE_NAME = "results.jsonl"
MAX_FILE_BYTES = 64_000_000
MAX_LINE_BYTES = 1_000_000

Check = Literal["accepted", "engaged", "parity"]
CHECKS: tuple[Check, ...] = ("accepted", "engaged", "parity")
Outcome = Literal["pass", "fail", "always_on", "no_effect", "refused", "crash", "unsupported", "error", "not_run"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Backend = Literal["plain", "mindspeed"]
Device = Literal["npu", "emulated"]
#: A way through verl to one step, see `releases`.
Route = Literal["engine", "worker"]
ROUTES: tuple[Route, ...] = get_args(Route)

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Package:
    """One package of the stack: what was imported, and from where."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    name: str
    version: str
    path: str | None = None
    commit: str | None = None


@dataclass(frozen=True)
class Header:
    """First line: what the run is. `started` is ISO 8601 in UTC; `rows` are the selected ids in matrix order."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    started: str
    device: Device
    backend: Backend
    precisions: Annotated[tuple[Precision, ...], Strict(False)]
    stack: Annotated[tuple[Package, ...], Strict(False)]
    matrix_sha256: str
    rows: Annotated[tuple[str, ...], Strict(False)]
    complete_selection: bool
    #: What differs from the stack that the suite is tested with; and what that stack declares to differ from the documented one.
    untested: Annotated[tuple[str, ...], Strict(False)] = ()
    deviations: Annotated[tuple[str, ...], Strict(False)] = ()
    route: Route = "engine"
    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["header"] = "header"

    def versions(self) -> dict[str, str]:
        """Normalised package name -> version."""
        return {canonicalize_name(p.name): p.version for p in self.stack}


@dataclass(frozen=True)
class UpstreamException:
    """An exception as upstream raised it: type, first line, innermost upstream frame (`file:line function`), owner."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    type: str
    message: str
    frame: str
    owner: str


@dataclass(frozen=True)
class CheckRecord:
    """One check of one spelling of a row under one role.

    `detail` is free-form JSON; the report reads these keys of it: `forms` (list of mappings with `form`, `outcome`,
    `overrides` (list of text) and `summary`), `evidence` (list of lines), `figures` (mapping of name to number or
    text), `how_to_run` (text). `conformance diff` reads `measured` (mapping of a figure's name to `difference`, `bound`
    and `where`). `wall_s` is in seconds.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    row: str
    role: Role
    variant: str
    check: Check
    precision: Precision | None
    outcome: Outcome
    summary: str
    exception: UpstreamException | None = None
    detail: dict[str, JsonValue] = field(default_factory=dict)
    wall_s: float = 0.0
    kind: Literal["check"] = "check"

    @property
    def name(self) -> tuple[str, str, str, str, str | None]:
        """What no two records of a run share."""
        return (self.row, self.role, self.variant, self.check, self.precision)


@dataclass(frozen=True)
class OperatorRecord:
    """One family of operators under generated inputs.

    `worst_ratio` is the largest error over the rounding error to be expected in the dtype (see `operators.tolerance`), None
    when no case came to a finite number. `falsifying` is the text of a test that fails in the same way. `wall_s` is in seconds.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    family: Family
    outcome: Outcome
    summary: str
    cases: int
    worst_ratio: float | None
    device: Device
    falsifying: str | None = None
    wall_s: float = 0.0
    kind: Literal["operator"] = "operator"


@dataclass(frozen=True)
class Footer:
    """Last line of a run that came to its end. `wall_s` is in seconds; `finished` is ISO 8601 in UTC."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    checks: int
    wall_s: float
    finished: str
    operators: int = 0
    kind: Literal["footer"] = "footer"


Line = Annotated[Header | CheckRecord | OperatorRecord | Footer, Field(discriminator="kind")]


@cache
def line_adapter() -> TypeAdapter[Header | CheckRecord | OperatorRecord | Footer]:
    """The validator of one line; also what the published schema is generated from."""
    return TypeAdapter(Line)


@dataclass(frozen=True)
class ResultSet:
    """One run as read back."""

    header: Header
    checks: tuple[CheckRecord, ...]
    footer: Footer | None
    operators: tuple[OperatorRecord, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether the run came to its end, be it of all rows or of some (`header.complete_selection`)."""
        return self.footer is not None


def new_run_directory(root: Path, started: str) -> Path:
    """Make a directory under `root` that no earlier run has, named after the start time; UsageFault if it cannot."""
    stem = "".join(c for c in started if c.isalnum())
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            directory = root / (stem if number == 1 else f"{stem}-{number}")
            try:
                directory.mkdir()
            except FileExistsError:
                continue
            return directory
    except OSError as fault:
        raise UsageFault(f"{root}: cannot make a directory for results: {fault.strerror}") from None
    raise UsageFault(f"{root}: a thousand runs started at {started}")


class ResultsWriter:
    """Writes a run's lines as they come, each one whole and on disk before the next.

    Never writes over an existing file. Any failure of the disk is a UsageFault of one line. Leaving the `with` block
    without `finish` leaves a file that reads as interrupted.
    """

    def __init__(self, directory: Path, header: Header) -> None:
        self.path = directory / FILE_NAME
        self._checks = self._operators = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Unbuffered: nothing is left to be flushed, and to fail again, when a full disk ends the run.
            self._file = self.path.open("xb", buffering=0)
        except FileExistsError:
            raise UsageFault(f"{self.path}: there are results already; right form: a new directory") from None
        except OSError as fault:
            raise UsageFault(f"{self.path}: cannot write results: {fault.strerror}") from None
        self._write(header)

    def add(self, record: CheckRecord | OperatorRecord) -> None:
        """Append one check, or one family of operators."""
        self._write(record)
        if isinstance(record, CheckRecord):
            self._checks += 1
        else:
            self._operators += 1

    def finish(self, finished: str, wall_s: float) -> None:
        """Append the footer: from here on the run is complete."""
        self._write(Footer(checks=self._checks, wall_s=wall_s, finished=finished, operators=self._operators))
        self._file.close()

    def _write(self, line: Header | CheckRecord | OperatorRecord | Footer) -> None:
        data = encode(line)
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as fault:
            raise UsageFault(f"{self.path}: cannot write results: {fault.strerror}") from None

    def __enter__(self) -> ResultsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()


def encode(line: Header | CheckRecord | OperatorRecord | Footer) -> bytes:
    """One JSON line. Figures that JSON lacks become text: `nan`, `inf`, `-inf`."""
    text = json.dumps(json_safe(asdict(line)), ensure_ascii=False, allow_nan=False)
    # A lone surrogate (from a path or a message that is not UTF-8) must not stop a run.
    return text.encode("utf-8", "replace") + b"\n"


def json_safe(value: Any) -> Any:
    """The value with figures that JSON lacks as text, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(v) for v in value]
    return value


def read_results(path: Path) -> ResultSet:
    """Read a run, its directory, or a reports directory with one published run; UsageFault with file and line for a fault.

    A last line without an end is what a killed run leaves: it is dropped, and the set is incomplete.
    """
    path = _file_of(path) if path.is_dir() else path
    if path.exists() and not path.is_file():  # a pipe would never end
        raise UsageFault(f"{path}: not a file; right form: the results of one run")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as fault:
        raise UsageFault(f"{path}: cannot be read: {fault.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageFault(f"{path}: larger than {MAX_FILE_BYTES} bytes; right form: the results of one run")
    whole = data[: data.rfind(b"\n") + 1]
    lines = [_parse(path, number, text) for number, text in enumerate(whole.split(b"\n")[:-1], 1)]
    return _assemble(path, lines)


def _file_of(directory: Path) -> Path:
    here = directory / FILE_NAME
    published = [] if here.exists() else sorted(directory.glob(f"*/{FILE_NAME}"))
    if len(published) > 1:
        names = ", ".join(p.parent.name for p in published)
        raise UsageFault(f"{directory}: holds the results of several stacks; right form: one of {names}")
    return published[0] if published else here


def _parse(path: Path, number: int, text: bytes) -> Header | CheckRecord | OperatorRecord | Footer:
    if len(text) > MAX_LINE_BYTES:
        raise UsageFault(f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes; right form: one check a line")
    try:
        line = line_adapter().validate_json(text)
        _require_plain_json(text)
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part)[:60] for part in first["loc"][1:])
        what = f"key {key!r}: {first['msg']}" if key else first["msg"]
        one_line = " ".join(what.split())[:300]
        raise UsageFault(f"{path}:{number}: {one_line}; right form: results.schema.json") from None
    except ValueError as fault:
        raise UsageFault(f"{path}:{number}: {fault}; right form: results.schema.json") from None
    return line


def _require_plain_json(text: bytes) -> None:
    """ValueError for what pydantic's reader lets through and other readers take otherwise: a key twice, NaN and Infinity."""

    def once(pairs: list[tuple[str, object]]) -> None:
        twice = [key for key, count in Counter(key for key, _value in pairs).items() if count > 1]
        if twice:
            raise ValueError(f"key {twice[0][:60]!r} is there twice")

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON number")

    # Numbers stay text: one of thousands of digits takes a while to convert.
    json.loads(text.decode("utf-8"), object_pairs_hook=once, parse_constant=refuse, parse_int=str, parse_float=str)


def _assemble(path: Path, lines: list[Header | CheckRecord | OperatorRecord | Footer]) -> ResultSet:
    if not lines or not isinstance(lines[0], Header):
        raise UsageFault(f"{path}:1: no header; right form: a header on the first line")
    header = lines[0]
    footer = lines[-1] if isinstance(lines[-1], Footer) else None
    checks: dict[tuple[str, str, str, str, str | None], CheckRecord] = {}
    operators: dict[str, OperatorRecord] = {}
    rows = frozenset(header.rows)
    for number, line in enumerate(lines[1 : -1 if footer else None], 2):
        if isinstance(line, OperatorRecord):
            if line.family in operators:
                raise UsageFault(f"{path}:{number}: a second record of {line.family}; right form: each family once")
            operators[line.family] = line
            continue
        if not isinstance(line, CheckRecord):
            raise UsageFault(f"{path}:{number}: a {line.kind} among the checks; right form: one header, one footer")
        if line.row not in rows:
            raise UsageFault(f"{path}:{number}: row {line.row[:60]!r} is not among the header's rows")
        if line.name in checks:
            raise UsageFault(f"{path}:{number}: a second record of one check; right form: each check once")
        checks[line.name] = line
    if footer and footer.checks != len(checks):
        raise UsageFault(f"{path}:{len(lines)}: the footer counts {footer.checks} checks, there are {len(checks)}")
    if footer and footer.operators != len(operators):
        raise UsageFault(f"{path}:{len(lines)}: the footer counts {footer.operators} operators, there are {len(operators)}")
    return ResultSet(header, tuple(checks.values()), footer, tuple(operators.values()))
