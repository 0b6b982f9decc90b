"""The rows of `matrix.yaml`: frozen, validated, and the only place that says what is tested.

`documented` holds the keys as the upstream page spells them, also where they are wrong: that is what is tested.
`variants` holds further spellings of the same feature that may work where the documented one does not.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator, Strict, WithJsonSchema, model_validator

from conformance import extensions, models
from conformance.condition import COMPARE, Condition, compare, shown
from conformance.errors import UsageFault
from conformance.operators import Family
from conformance.yamlsource import Items, Strictly, form_error, load, nearest, validate

ROOT = Path(__file__).resolve().parent.parent
MATRIX = ROOT / "matrix.yaml"

Role = Literal["actor", "ref"]
ROLES: tuple[Role, ...] = ("actor", "ref")
Side = Literal["on", "off", "absent"]
Form = Literal["plain", "+", "++"]
Scalar = bool | int | float | str | None
#: Marks the keys of verl's open mapping that is handed to megatron-core's TransformerConfig (and to MindSpeed).
OVERRIDES = ".override_transformer_config."

_GROUP = "(tp|pp|cp|dp|ep|etp|dp_cp|edp|etp_ep|tp_cp)"
_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_TARGET = rf"{_DOTTED}:{_DOTTED}"
#: Fact family -> the form of what follows the first dot. `conformance.probes` produces these facts.
_FAMILIES = {
    "groups": _GROUP,
    "collectives": _GROUP + r"\.(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|reduce|send|recv|any)",
    "ops": r"[a-z_][a-z0-9_]*",
    "modules": _DOTTED,
    "layers": "(count|first)",
    "calls": _TARGET,
    "optimizer": r"[a-z_][a-z0-9_]*",
    "config": r"[a-z_][a-z0-9_]*",
    "reads": r"[a-z_][a-z0-9_]*",
    "patched": _TARGET,
    "storage": r"[a-z_][a-z0-9_]*",
}
#: A fact of a family that another package's probe brings. The published schema cannot know which families are installed.
_OWN_FACT = rf"(?!({'|'.join(_FAMILIES)})\.)[a-z][a-z0-9_]*\.{extensions.KEY}"
_ID = "[a-z0-9]+(-[a-z0-9]+)*"
_KEY = r"actor_rollout_ref\.(actor|ref)(\.[a-z_][a-z0-9_]*)+"


def _check_fact(text: str) -> str:
    family, dot, rest = text.partition(".")
    forms = _FAMILIES | dict.fromkeys(own_families(), extensions.KEY)
    if family not in forms or not dot:
        raise form_error(f"unknown fact family {family!r}", nearest(family, forms))
    if not re.fullmatch(forms[family], rest):
        raise form_error(f"{text!r} is not a fact", f"{family}. and then {forms[family]}")
    return text


def own_families() -> tuple[str, ...]:
    """The fact families that other packages' probes bring."""
    return extensions.names(extensions.PROBES, _FAMILIES)


def _check_model(text: str) -> str:
    known = models.names()
    if text not in known:
        raise form_error(f"unknown model {text[:60]!r}", nearest(text, known))
    return text


def _check_id(text: str) -> str:
    if not re.fullmatch(_ID, text):
        raise form_error(f"{text[:60]!r} is not an id", "a-z, 0-9 and single dashes between them")
    if "ep" in text and text != "ep":
        raise form_error(f"{text!r} contains 'ep'", "an id without it: 'pytest -k ep' must select the row 'ep' alone")
    return text


def _check_scalar(value: object) -> Scalar:
    if isinstance(value, float) and not math.isfinite(value):
        raise form_error("not a finite number", "a number, text, true, false or null")
    if isinstance(value, str) and ("${" in value or not value.isprintable()):
        raise form_error("interpolations and control characters are not allowed", "plain text")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise form_error("a list or mapping", "a number, text, true, false or null")


def _check_key(text: str) -> str:
    if not re.fullmatch(_KEY, text):
        raise form_error(f"{text[:80]!r} is not a key", "the full dotted key, actor_rollout_ref.actor... or .ref...")
    return text


def _check_world_size(value: int) -> int:
    if value not in (1, 2, 4):
        raise form_error(f"{value} ranks", "1, 2 or 4")
    return value


Id = Annotated[str, AfterValidator(_check_id), WithJsonSchema({"type": "string", "pattern": f"^{_ID}$"})]
Key = Annotated[str, AfterValidator(_check_key), WithJsonSchema({"type": "string", "pattern": f"^{_KEY}$"})]
FactName = Annotated[
    str,
    AfterValidator(_check_fact),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "pattern": rf"^{form}$"} for form in (*map(r"\.".join, _FAMILIES.items()), _OWN_FACT)]}
    ),
]
Model = Annotated[
    str,
    AfterValidator(_check_model),
    WithJsonSchema({"anyOf": [{"enum": list(models.built_in())}, {"type": "string", "pattern": "^[a-z][a-z0-9_]*$"}]}),
]
Value = Annotated[
    Scalar,
    PlainValidator(_check_scalar),
    WithJsonSchema({"type": ["boolean", "integer", "number", "string", "null"]}),
]
ConditionText = Annotated[
    Condition,
    PlainValidator(Condition.parse),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "pattern": r"^\s*(==|!=|>=|<=|>|<)\s*\S+\s*$"}),
]


def _check_words(text: str) -> str:
    if not text.strip():
        raise form_error("blank text", "some words")
    return text


WorldSize = Annotated[int, Strict(), AfterValidator(_check_world_size), WithJsonSchema({"enum": [1, 2, 4]})]
Size = Annotated[int, Field(ge=1, le=4)]
Words = Annotated[str, Field(min_length=1, max_length=2000, json_schema_extra={"pattern": r"\S"}), AfterValidator(_check_words)]


class Bilingual(Strictly):
    """The same text in English and in Chinese."""

    en: Words
    zh: Words


class Setting(Strictly):
    """One key of the feature with the value that switches it on and the one that switches it off."""

    key: Key
    on: Value
    off: Value


class Companion(Strictly):
    """A key that must go with the feature's own; it has the same value in every run of the row."""

    key: Key
    value: Value


@dataclass(frozen=True)
class Judged:
    """Whether a condition held, and a line that says fact, ranks, values and what was wanted."""

    holds: bool
    text: str


class Evidence(Strictly):
    """What must be seen in what ran. Values are lists of one fact's value on each rank, in rank order.

    `on` must hold in the run with the key on, `off` in the run with the key off; `change` compares on with off, rank by
    rank. `ranks: any` asks `on` and `change` of one rank only; `off` holds on every rank, for it says what is absent.
    """

    fact: FactName
    on: ConditionText | None = None
    off: ConditionText | None = None
    change: Annotated[str | None, Field(json_schema_extra={"enum": [*COMPARE, None]})] = None
    roles: Items[Role] = Field(ROLES, min_length=1)
    ranks: Literal["all", "any"] = "all"

    @model_validator(mode="after")
    def _is_two_sided(self) -> Evidence:
        if self.change is not None and self.change not in COMPARE:
            raise form_error(f"{self.change!r} is not an operator", "one of " + " ".join(COMPARE), "change")
        if self.change is None and (self.on is None or self.off is None):
            raise form_error("evidence must be two-sided", "both 'on' and 'off', or 'change'")
        return self

    def judge_on(self, values: Sequence[float | str | None]) -> Judged | None:
        """Judge the run with the key on; None when nothing is asked of it."""
        return self._judge(self.on, values, self.ranks) if self.on else None

    def judge_off(self, values: Sequence[float | str | None]) -> Judged | None:
        """Judge the run with the key off; None when nothing is asked of it."""
        return self._judge(self.off, values, "all") if self.off else None

    def judge_change(self, on: Sequence[float | str | None], off: Sequence[float | str | None]) -> Judged | None:
        """Compare the two runs rank by rank; None when nothing is asked. ValueError if the rank counts differ."""
        if self.change is None:
            return None
        marks = [compare(self.change, left, right) for left, right in zip(on, off, strict=True)]
        seen = [f"{shown(left)} (off: {shown(right)})" for left, right in zip(on, off, strict=True)]
        return self._line(marks, seen, f"{self.change} the value when off", self.ranks)

    def _judge(self, wanted: Condition, values: Sequence[float | str | None], ranks: str) -> Judged:
        return self._line([wanted.holds(v) for v in values], [shown(v) for v in values], str(wanted), ranks)

    def _line(self, marks: list[bool], seen: list[str], wanted: str, ranks: str) -> Judged:
        holds = any(marks) if ranks == "any" else bool(marks) and all(marks)
        shown = ", ".join(f"rank {i}: {text}" for i, text in enumerate(seen)) or "no rank reported"
        return Judged(holds, f"{self.fact}: {shown}; wanted {wanted} on {'any' if ranks == 'any' else 'every'} rank")


class Spelling(Strictly):
    """One way to write the feature. `evidence` here replaces the row's."""

    settings: Items[Setting] = Field(min_length=1)
    companions: Items[Companion] = ()
    world_size: WorldSize | None = Field(None, description="ranks of this spelling's runs, if not the row's")
    evidence: Annotated[Items[Evidence], Field(min_length=1)] | None = None
    note: Bilingual | None = None

    def settings_for(self, role: Role) -> tuple[Setting, ...]:
        """The settings as that role spells them: its own keys if there are any, else the other role's, moved over."""
        own = tuple(s for s in self.settings if s.key.startswith(_prefix(role)))
        return own or tuple(s.model_copy(update={"key": _moved(s.key, role)}) for s in self.settings)


class Variant(Spelling):
    """A further spelling, with a name of its own."""

    name: Id


class Topology(Strictly):
    """Engine-level parallel sizes that every run of the row has, whether its key is on, off or absent."""

    tensor_model_parallel_size: Size | None = None
    pipeline_model_parallel_size: Size | None = None
    expert_model_parallel_size: Size | None = None
    expert_tensor_parallel_size: Size | None = None
    context_parallel_size: Size | None = None

    def sizes(self) -> dict[str, int]:
        """The sizes that are set, by field name."""
        return {name: size for name, size in self.model_dump().items() if size is not None}


class Row(Strictly):
    """One feature of the upstream page."""

    id: Id
    name: Words = Field(description="as the upstream page names it")
    title: Bilingual
    table: Literal["feature", "fused_operator"]
    status: Literal["Dev", "Preview", "Released"]
    implemented_by: Literal["megatron-core", "mindspeed"]
    model: Model = Field(description="a tiny model of fixtures/, or of another package")
    world_size: WorldSize
    topology: Topology = Topology()
    precisions: Items[Literal["float32", "bfloat16"]] = Field(("float32", "bfloat16"), min_length=1)
    documented: Spelling
    variants: Items[Variant] = ()
    parity: Literal["identical", "reordered", "kernel"]
    evidence: Items[Evidence] = Field(min_length=1)
    operators: Items[Family] = Field((), description="families of fused operators that the row rests on")
    note: Bilingual | None = None

    @model_validator(mode="after")
    def _variants_have_names_of_their_own(self) -> Row:
        for i, variant in enumerate(self.variants):
            if variant.name in ("documented", *(v.name for v in self.variants[:i])):
                raise form_error(f"duplicate variant {variant.name!r}", "a name of its own", "variants", i, "name")
        return self

    @property
    def variant_names(self) -> tuple[str, ...]:
        """`documented` first, then the variants in their order."""
        return ("documented", *(v.name for v in self.variants))

    def spelling(self, variant: str) -> Spelling:
        """The spelling of that name; KeyError if there is none."""
        return {"documented": self.documented, **{v.name: v for v in self.variants}}[variant]

    def ranks(self, variant: str) -> int:
        """How many ranks that spelling's runs have."""
        return self.spelling(variant).world_size or self.world_size

    def evidence_for(self, variant: str, role: Role) -> tuple[Evidence, ...]:
        """What to look for in that spelling's runs under that role."""
        return tuple(e for e in self.spelling(variant).evidence or self.evidence if role in e.roles)

    def overrides(self, variant: str, side: Side) -> tuple[str, ...]:
        """The override strings of a run, the same for both roles: ref inherits what is set for the actor only.

        Topology and companions are in every run, the settings unless `absent`. Keys under override_transformer_config
        take `++`: some exist there and some do not, and `++` writes both.
        """
        spelling = self.spelling(variant)
        sizes = self.topology.sizes().items()
        values: dict[str, Scalar] = {f"{_prefix(role)}megatron.{name}": size for role in ROLES for name, size in sizes}
        values.update({c.key: c.value for c in spelling.companions})
        if side != "absent":
            values.update({s.key: s.on if side == "on" else s.off for s in spelling.settings})
        return tuple(override_text(k, v, "++" if OVERRIDES in k else "plain") for k, v in values.items())


class Matrix(Strictly):
    """All rows, in the page's order."""

    rows: Items[Row] = Field(min_length=1)

    @model_validator(mode="after")
    def _ids_are_unique(self) -> Matrix:
        counts: Counter[str] = Counter()
        for i, row in enumerate(self.rows):
            counts[row.id] += 1
            if counts[row.id] > 1:
                raise form_error(f"duplicate id {row.id!r}", "an id that no other row has", "rows", i, "id")
        return self

    def __getitem__(self, row_id: str) -> Row:
        return next(row for row in self.rows if row.id == row_id)

    def ids(self) -> Iterator[str]:
        return (row.id for row in self.rows)


def load_matrix(path: Path = MATRIX) -> Matrix:
    """Read and check a matrix; UsageFault with file, line and the right form for the first fault."""
    if path == MATRIX and not path.exists():
        raise UsageFault("no matrix.yaml here: an installed package has no rows; right form: --matrix FILE")
    return validate(load(path), Matrix)


def _prefix(role: Role) -> str:
    return f"actor_rollout_ref.{role}."


def _moved(key: str, role: Role) -> str:
    return re.sub(r"^actor_rollout_ref\.(actor|ref)\.", _prefix(role), key)


def override_text(key: str, value: Scalar, form: Form) -> str:
    """One Hydra override, e.g. `++a.b='4,5'`. Not quoted for a shell.

    Text that Hydra would read as anything else (a number, a list, a boolean) goes in single quotes.
    """
    return f"{'' if form == 'plain' else form}{key}={_hydra_value(value)}"


def _hydra_value(value: Scalar) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    special = value.lower() in ("null", "true", "false", "nan", "inf")
    if re.fullmatch(r"[A-Za-z_][\w./-]*", value, re.ASCII) and not special:
        return value
    # In Hydra's grammar a backslash only escapes in front of a quote, so only those before one (or at the end) double.
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value) + "'"
