"""YAML files from strangers: plain data in which every node keeps its line, and every fault is one line of text.

A small and safe subset is read. Scalars follow YAML 1.2 (`on` and `off` are text, only `true` and `false` are
booleans); tags, anchors and aliases are refused, so nothing is constructed or expanded; size and depth are bounded.
"""

from __future__ import annotations

import difflib
import os.path
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Strict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from conformance.errors import UsageFault

MAX_BYTES = 1_000_000
MAX_DEPTH = 20

#: Where a node is: mapping keys and sequence indices from the root.
Location = tuple[str | int, ...]

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
#: A YAML list, kept as a tuple. Only the container is lax (list to tuple); its items stay strict.
Items = Annotated[tuple[T, ...], Strict(False)]

_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


class _NodeLoader(yaml.BaseLoader):
    """PyYAML's composer, refusing what the subset leaves out before it is composed."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _refusal(event.start_mark, "anchors and aliases are not allowed", "write the value out")
        if getattr(event, "tag", None) is not None:
            raise _refusal(event.start_mark, f"the tag {event.tag!r} is not allowed", "no tag")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refusal(event.start_mark, f"nested deeper than {MAX_DEPTH} levels", "as in the published schema")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _refusal(mark: yaml.Mark, what: str, right: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(None, None, f"{what}; right form: {right}", mark)


def form_error(what: str, right: str, *at: str | int) -> PydanticCustomError:
    """The error that a model's own validators raise; `at` leads from the validated value to the node to blame."""
    # The texts travel in the context, since a template would trip over braces in them.
    return PydanticCustomError("form", "{what}; right form: {right}", {"what": what, "right": right, "at": at})


def nearest(wrong: str, known: Iterable[str]) -> str:
    """The right form for a name that is not among `known`."""
    choices = list(known)
    close = difflib.get_close_matches(wrong, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "one of " + ", ".join(choices)


class Strictly(BaseModel):
    """Frozen, exactly typed, and without fields that it does not declare."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if key not in cls.model_fields:
                    raise form_error(f"unknown field {key!r}", nearest(str(key), cls.model_fields), key)
        return value


@dataclass(frozen=True)
class Document:
    """The data of one file, the line (from 1) of every node, and where in the text (after a BOM) each YAML scalar stands.

    `list_form` says how its language writes a list.
    """

    name: str
    data: Any
    lines: Mapping[Location, int]
    spans: Mapping[Location, tuple[int, int]] = field(default_factory=dict)
    list_form: str = "one '- item' a line"

    def fault(self, at: Location, text: str, line: int | None = None) -> UsageFault:
        """`file:line: row 'x': key 'y': text` for the node at `at`, or for the nearest one that exists above it."""
        known = next(at[:n] for n in range(len(at), -1, -1) if at[:n] in self.lines)
        parts = [f"{self.name}:{line or self.lines[known]}", *self._row(at), *_key(at), text]
        return UsageFault(": ".join(" ".join(part.split()) for part in parts))

    def _row(self, at: Location) -> list[str]:
        if len(at) < 2 or not isinstance(at[1], int):
            return []
        item = self.data[at[0]][at[1]]
        name = item.get("id", item.get("row")) if isinstance(item, dict) else None
        return [f"row {name[:60]!r}" if isinstance(name, str) else f"row number {at[1] + 1}"]


def _key(at: Location) -> list[str]:
    inside = at[2:] if len(at) >= 2 and isinstance(at[1], int) else at
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:60]}" for part in inside)
    return [f"key {text.removeprefix('.')!r}"] if text else []


def load(path: Path) -> Document:
    """Read one YAML document; UsageFault (one line) for anything that is not UTF-8 YAML of the subset."""
    name = display(path)
    try:
        raw = read_bounded(path, name, MAX_BYTES)
        node = yaml.compose(raw.decode("utf-8-sig"), Loader=_NodeLoader)
    except OSError as fault:
        raise UsageFault(f"{name}: cannot be read: {fault.strerror}") from None
    except UnicodeDecodeError as fault:
        line = raw.count(b"\n", 0, fault.start) + 1
        raise UsageFault(f"{name}:{line}: not UTF-8 (byte 0x{raw[fault.start]:02x}); right form: UTF-8 text") from None
    except yaml.MarkedYAMLError as fault:
        mark = fault.problem_mark or fault.context_mark
        line = mark.line + 1 if mark else 1
        problem = " ".join((fault.problem or fault.context or "not YAML").split())
        hint = "" if "right form" in problem else "; right form: YAML, see the published schema"
        raise UsageFault(f"{name}:{line}: {problem}{hint}") from None
    except yaml.reader.ReaderError as fault:
        raise UsageFault(f"{name}: character U+{fault.character:04X} is not allowed; right form: plain text") from None
    if node is None:
        raise UsageFault(f"{name}:1: empty; right form: a mapping, see the published schema")
    builder = _Builder()
    document = Document(name, builder.build(node), builder.lines, builder.spans)
    for at, line, text in builder.faults:
        raise document.fault(at, text, line)
    return document


def display(path: Path) -> str:
    """The path as a user would type it: below the working directory, relative to it."""
    absolute = Path(os.path.abspath(path))  # not Path.resolve, which a loop of links stops
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(path)


def read_bounded(path: Path, name: str, limit: int) -> bytes:
    """The whole file; UsageFault when it is larger than `limit` bytes, or a pipe, which would never end. OSError as it comes."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageFault(f"{name}: not a file; right form: one small file")
    with path.open("rb") as file:
        raw = file.read(limit + 1)
    if len(raw) > limit:
        raise UsageFault(f"{name}: larger than {limit} bytes; right form: one small file")
    return raw


class _Builder:
    """Plain data of a node tree, with the lines; faults wait until the data is whole, so that they can name the row."""

    def __init__(self) -> None:
        self.lines: dict[Location, int] = {}
        self.spans: dict[Location, tuple[int, int]] = {}
        self.faults: list[tuple[Location, int, str]] = []

    def build(self, node: yaml.Node, at: Location = ()) -> Any:
        self.lines.setdefault(at, node.start_mark.line + 1)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*at, i)) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at)
        assert isinstance(node, yaml.ScalarNode)
        self.spans[at] = (node.start_mark.index, node.end_mark.index)
        return node.value if node.style else _plain_scalar(node.value)

    def _mapping(self, node: yaml.MappingNode, at: Location) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key, child in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.faults.append((at, line, "a list or mapping as a key; right form: a plain word"))
                continue
            here = (*at, key.value)
            if key.value in mapping:
                what = f"duplicate key (first on line {self.lines[here]}); right form: each key once"
                self.faults.append((here, line, what))
                continue
            self.lines[here] = line
            mapping[key.value] = self.build(child, here)
        return mapping


def _plain_scalar(text: str) -> bool | int | float | str | None:
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def validate(document: Document, model: type[M]) -> M:
    """The document as `model`; UsageFault for the first thing that is wrong, with its line."""
    try:
        return model.model_validate(document.data)
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        at = (*first["loc"], *first.get("ctx", {}).get("at", ()))
        raise document.fault(at, _explain(first, document.list_form)) from None


#: pydantic's error type -> (what is wrong, right form), filled from the error's own context.
_EXPLAINED = {
    "missing": ("missing", "see the published schema"),
    "string_type": ("{input} is not text", "text, in quotes if it looks like a number or a boolean"),
    "bool_type": ("{input} is not a boolean", "true or false"),
    "int_type": ("{input} is not a whole number", "a whole number without quotes"),
    "date_type": ("{input} is not a date", "a date without quotes, such as 2026-12-31"),
    "date_from_datetime_inexact": ("{input} is not a date", "a date without a time, such as 2026-12-31"),
    "literal_error": ("{input} is not allowed", "one of {expected}"),
    "model_type": ("{input} is not a mapping", "a mapping with the fields of the published schema"),
    "mapping_type": ("{input} is not a mapping", "a mapping"),
    "tuple_type": ("{input} is not a list", "a list: {list_form}"),
    "greater_than_equal": ("{input} is too small", "at least {ge}"),
    "less_than_equal": ("{input} is too large", "at most {le}"),
    "too_short": ("too few items", "at least {min_length}"),
    "string_too_short": ("empty text", "at least {min_length} character"),
    "string_too_long": ("text too long", "at most {max_length} characters"),
    "string_pattern_mismatch": ("{input} has the wrong form", "text that matches {pattern}"),
}


def _explain(error: ErrorDetails, list_form: str) -> str:
    if error["type"] not in _EXPLAINED:
        return error["msg"]
    what, right = _EXPLAINED[error["type"]]
    context: dict[str, Any] = {**error.get("ctx", {}), "input": _shown(error["input"]), "list_form": list_form}
    return f"{what.format(**context)}; right form: {right.format(**context)}"


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list"
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    return repr(value[:60] if isinstance(value, str) else value)
