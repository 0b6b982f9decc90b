"""The matrix: all 18 rows as the page has them, and every fault told in one line with its place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from conformance.condition import Condition
from conformance.errors import UsageFault
from conformance.matrix import MATRIX, Evidence, load_matrix, override_text
from conformance.schema import DIRECTORY, texts

A = "actor_rollout_ref.actor.megatron."
R = "actor_rollout_ref.ref.megatron."
O = A + "override_transformer_config."  # noqa: E741  as in the upstream page's notation

# Typed in from the upstream page, independently of matrix.yaml.
PAGE = {
    "TP": [A + "tensor_model_parallel_size", R + "tensor_model_parallel_size"],
    "PP": [A + "pipeline_model_parallel_size", R + "pipeline_model_parallel_size"],
    "EP": [A + "expert_model_parallel_size", R + "expert_model_parallel_size"],
    "ETP": [A + "expert_tensor_parallel_size", R + "expert_tensor_parallel_size"],
    "SP": [O + "sequence_parallel"],
    "分布式优化器": [O + "use_distributed_optimizer"],
    "swap-optimizer": [O + "swap_optimizer"],
    "自定义空操作层": [O + "noop_layers", O + "num_layers"],
    "重计算": [O + "recompute_method", O + "recompute_granularity", O + "recompute_num_layers"],
    "CP": [A + "context_parallel_size", O + "context_parallel_size"],
    "MoE alltoall dispatcher": [O + "moe_permutation_async_comm"],
    "Multi-head Latent Attention": [O + "multi_head_latent_attention"],
    "fusion attention": [O + "use_flash_attn"],
    "rms norm": [O + "use_fused_rmsnorm"],
    "swiglu": [O + "use_fused_swiglu"],
    "permute_unpermute": [O + "fused_permute_and_unpermute"],
    "gemm": [O + "moe_grouped_gemm"],
    "mc2": [O + "use_ascend_mc2"],
}

SETTING = "{key: actor_rollout_ref.ref.x, on: 1, off: 0}"
ROW = """\
rows:
  - id: tp
    name: TP
    title: {en: tensor, zh: 张量}
    table: feature
    status: Preview
    implemented_by: megatron-core
    model: dense
    world_size: 2
    documented:
      settings:
        - {key: actor_rollout_ref.actor.megatron.a, on: 2, off: 1}
    parity: reordered
    evidence:
      - {fact: groups.tp, on: "== 2", off: "== 1"}
"""


def fault(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "matrix.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageFault) as caught:
        load_matrix(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_the_shipped_matrix_is_the_page() -> None:
    matrix = load_matrix()
    assert {r.name: [s.key for s in r.documented.settings] for r in matrix.rows} == PAGE
    assert [r.name for r in matrix.rows] == list(PAGE)
    assert [r.table for r in matrix.rows] == ["feature"] * 12 + ["fused_operator"] * 6
    assert {r.status for r in matrix.rows} == {"Preview"}
    megatron = [r.id for r in matrix.rows if r.implemented_by == "megatron-core"]
    assert megatron == ["tp", "pp", "ep", "etp", "sp", "distributed-optimizer", "recompute", "cp", "mla"]
    assert all(not r.documented.companions for r in matrix.rows), "the page names no companions"


def test_rows_are_frozen() -> None:
    row = load_matrix()["tp"]
    with pytest.raises(ValueError, match="frozen"):
        row.id = "x"  # type: ignore[misc]


def test_k_ep_can_select_one_row_only() -> None:
    matrix = load_matrix()
    names = [row.id for row in matrix.rows] + [name for row in matrix.rows for name in row.variant_names]
    assert [name for name in names if "ep" in name] == ["ep"]


def test_the_small_row_of_these_tests_is_good(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(ROW, encoding="utf-8")
    assert list(load_matrix(path).ids()) == ["tp"]


def change(old: str, new: str) -> str:
    assert ROW.count(old) == 1, old
    return ROW.replace(old, new)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (change("    parity:", "    parrity:"), r":13: row 'tp': key 'parrity': .*did you mean 'parity'\?"),
        (change("parity: reordered", "parity: close"), r":13: row 'tp': key 'parity': 'close' .*'identical'"),
        (change("world_size: 2", 'world_size: "2"'), r":9: row 'tp': key 'world_size': '2' .*without quotes"),
        (change("world_size: 2", "world_size: true"), r":9: row 'tp': key 'world_size': true is not a whole number"),
        (change("world_size: 2", "world_size: 2.0"), r":9: .*2\.0 is not a whole number"),
        (change("world_size: 2", "world_size: 3"), r":9: .*3 ranks; right form: 1, 2 or 4"),
        (change("name: TP", "name: 7"), r":3: row 'tp': key 'name': 7 is not text; right form: text, in quotes"),
        (change("name: TP", 'name: ""'), r":3: row 'tp': key 'name': empty text"),
        (change("    name: TP\n", ""), r":2: row 'tp': key 'name': missing"),
        (change("    name: TP\n", "    name: TP\n    name: TP\n"), r":4: row 'tp': key 'name': duplicate .*line 3"),
        (change("on: 2, off: 1}", "on: 2, on: 1}"), r":12: row 'tp': key 'documented\.settings\[0\]\.on': dupl"),
        (ROW + ROW.removeprefix("rows:\n"), r":16: row 'tp': key 'id': duplicate id 'tp'"),
        (change("id: tp", "id: Tp"), r":2: row 'Tp': key 'id': 'Tp' is not an id; right form: a-z"),
        (change("id: tp", "id: deep"), r":2: row 'deep': key 'id': 'deep' contains 'ep'"),
        (change('"== 2"', '"= 2"'), r":15: row 'tp': key 'evidence\[0\]\.on': '= 2' is not a condition; right form: "),
        (change('"== 2"', '"> two"'), r":15: .*orders text; right form: a number"),
        (change(', off: "== 1"', ""), r":15: row 'tp': key 'evidence\[0\]': evidence must be two-sided"),
        (change('"== 1"}', '"== 1", change: "=>"}'), r":15: .*key 'evidence\[0\]\.change': '=>' is not an operator"),
        (change("groups.tp", "group.tp"), r":15: .*unknown fact family 'group'; right form: did you mean 'groups'\?"),
        (change("groups.tp", "groups.xp"), r":15: .*'groups\.xp' is not a fact; right form: groups\. "),
        (change("megatron.a,", "megatron.A,"), r":12: .*key 'documented\.settings\[0\]\.key': .*is not a key"),
        (change("on: 2,", "on: [2],"), r":12: .*\.on': a list or mapping; right form: a number, text"),
        (change("on: 2,", "on: 1e999,"), r":12: .*not a finite number"),
        (change("on: 2,", "on: '${oc.env:HOME}',"), r":12: .*interpolations"),
        (change("title: {en: tensor, zh: 张量}", "title: tensor"), r":4: .*key 'title': 'tensor' is not a mapping"),
        (change("    evidence:\n", "    evidence: {}\n    x:\n"), r":15: .*key 'x': unknown field"),
        (change("    table:", "    topology: {tensor_model_parallel_siz: 2}\n    table:"), r":5: .*you mean"),
        (change("    table:", "    topology: {context_parallel_size: 0}\n    table:"), r":5: .*0 is too small"),
        (
            change("    parity:", f"    variants:\n      - {{name: documented, settings: [{SETTING}]}}\n    parity:"),
            r":14: row 'tp': key 'variants\[0\]\.name': duplicate variant",
        ),
        ("rows: []\n", r":1: key 'rows': too few items"),
        ("rows: 3\n", r":1: key 'rows': 3 is not a list"),
        ("- a\n", r":1: a list is not a mapping"),
        ("rows:\n  - 5\n", r":2: row number 1: 5 is not a mapping"),
        ("rows:\n  - {? [a] : 1}\n", r":2: .*a list or mapping as a key"),
        ("rows: [\n", r":2: .*; right form: YAML"),
        ("rows:\n\t- a\n", r":2: .*; right form: YAML"),
        ("a: 1\n---\nb: 1\n", r":2: .*but found another document"),
        ("", r":1: empty"),
        ("# nothing\n", r":1: empty"),
        (b"rows:\n  - id: \xff\n", r":2: not UTF-8 \(byte 0xff\)"),
        (b"rows: \x00\n", r": character U\+0000 is not allowed"),
        (b"a: b\n" * 300_000, r": larger than 1000000 bytes"),
        ("rows: !!python/object/apply:os.system [echo]\n", r":1: the tag .* is not allowed"),
        ("rows: !x 1\n", r":1: the tag '!x' is not allowed"),
        ("a: &a [1]\nrows: [*a, *a]\n", r":1: anchors and aliases are not allowed"),
        ("rows: " + "[" * 5000 + "\n", r":1: nested deeper than 20 levels"),
        (change("id: tp", 'id: "t\\np\\nrow"'), r":2: row 't\\np\\nrow': key 'id': "),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_with_its_place_and_the_right_form(tmp_path: Path, text: str | bytes, wanted: str) -> None:
    message = fault(tmp_path, text)
    assert re.match(wanted, message), message


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(UsageFault, match=r"cannot be read: (No such file|Is a directory)"):
            load_matrix(path)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_bytes_get_past_the_one_line_fault(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "m.yaml"
    path.write_bytes(data)
    with pytest.raises(UsageFault) as caught:
        load_matrix(path)
    assert len(str(caught.value).splitlines()) == 1


def test_on_and_off_are_text_and_only_true_and_false_are_booleans(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(change("on: 2, off: 1}", "on: yes, off: False}").replace("{en: tensor,", "{en: .inf,"), encoding="utf-8")
    row = load_matrix(path).rows[0]
    setting = row.documented.settings[0]
    assert (setting.on, setting.off, row.title.en) == ("yes", "False", ".inf")


@pytest.mark.parametrize("name", ["matrix.schema.json", "known_issues.schema.json", "results.schema.json"])
def test_the_committed_schema_is_the_generated_one(name: str) -> None:
    assert (DIRECTORY / name).read_text(encoding="utf-8") == texts()[name], "run python -m conformance.schema"


def test_editors_find_the_schema_and_it_judges_as_the_model_does(tmp_path: Path) -> None:
    for path in (MATRIX, MATRIX.with_name("known_issues.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        named = first.removeprefix("# yaml-language-server: $schema=")
        assert (MATRIX.parent / named).is_file(), first
    schema = json.loads(texts()["matrix.schema.json"])
    jsonschema.Draft202012Validator.check_schema(schema)
    assert _schema_accepts(schema, MATRIX.read_text(encoding="utf-8"))
    for old, new in [
        ("parity: reordered", "parity: close"),
        ("world_size: 2", "world_size: 3"),
        ("id: tp", "id: Tp"),
        ('"== 2"', '"= 2"'),
        ("groups.tp", "groups.xp"),  # of a family that is not the suite's, the schema cannot know
        ("    name: TP\n", ""),
        ("    name: TP\n", "    name: TP\n    nom: TP\n"),
        ("megatron.a,", "megatron.A,"),
        ("on: 2,", "on: [2],"),
    ]:
        text = change(old, new)
        assert not _schema_accepts(schema, text), new
        fault(tmp_path, text)


def _schema_accepts(schema: object, text: str) -> bool:
    # YAML 1.1 takes on and off for booleans: write them as what they are.
    data = yaml.safe_load(re.sub(r"\b(on|off):", r'"\1":', text))
    return jsonschema.Draft202012Validator(schema).is_valid(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "true_for", "false_for"),
    [
        ("> 0", [1, 0.5], [0, -1, None, "1"]),
        (">= 2", [2, 3], [1.9, None]),
        ("< 0", [-1], [0, None, "-1"]),
        ("<= 0", [0, None, -2], [0.1]),
        ("== 0", [0, None, 0.0], [1, "0"]),
        ("!= 0", [1, "x"], [0, None]),
        ("== 2.5", [2.5], [2]),
        ("== a.B", ["a.B"], ["a.b", None, 0]),
        ("!= a.B", ["a.b", None, 0], ["a.B"]),
        ("== nan", ["nan"], [0, None]),
    ],
)
def test_conditions(text: str, true_for: list[float | str | None], false_for: list[float | str | None]) -> None:
    condition = Condition.parse(text)
    assert [v for v in true_for if not condition.holds(v)] == []
    assert [v for v in false_for if condition.holds(v)] == []
    assert str(condition) == text


def evidence(**fields: object) -> Evidence:
    return Evidence.model_validate({"fact": "collectives.tp.all_reduce", **fields})


def test_evidence_must_hold_on_every_rank_and_says_which_rank_had_what() -> None:
    both = evidence(on="> 0", off="== 0")
    good, bad = both.judge_on([3, 4]), both.judge_on([3, None])
    assert good is not None
    assert good.holds
    assert bad is not None
    assert not bad.holds
    assert bad.text == "collectives.tp.all_reduce: rank 0: 3, rank 1: absent; wanted > 0 on every rank"
    empty = both.judge_on([])
    assert empty is not None
    assert not empty.holds, "no rank is no evidence"
    assert both.judge_change([1], [0]) is None


def test_ranks_any_asks_one_rank_for_on_but_every_rank_for_off() -> None:
    some = evidence(on="> 0", off="== 0", ranks="any")
    on, off = some.judge_on([0, 2]), some.judge_off([0, 2])
    assert on is not None
    assert on.holds
    assert off is not None
    assert not off.holds, "present on one rank is present"


def test_change_compares_rank_by_rank() -> None:
    less = evidence(change="<")
    assert less.judge_on([1]) is None
    assert less.judge_off([1]) is None
    good, bad = less.judge_change([1, 1], [2, 2]), less.judge_change([1, 2], [2, 2])
    assert good is not None
    assert good.holds
    assert bad is not None
    assert not bad.holds
    assert "rank 1: 2 (off: 2)" in bad.text
    with pytest.raises(ValueError, match="longer"):
        less.judge_change([1], [2, 2])


def test_each_role_gets_the_keys_that_it_spells() -> None:
    matrix = load_matrix()
    assert matrix["tp"].overrides("documented", "off") == (
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
        "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=1",
    )
    on = matrix["mc2"].overrides("effective", "on")
    assert on[:2] == tuple(f"{r}tensor_model_parallel_size=2" for r in ("actor_rollout_ref.actor.megatron.", R))
    assert all(o.startswith("++actor_rollout_ref.actor.") and ".override_transformer_config." in o for o in on[2:])
    assert len(matrix["mc2"].overrides("documented", "absent")) == 2
    roles = [e.fact for e in matrix["swap-optimizer"].evidence_for("documented", "ref")]
    assert roles == [], "ref has no optimizer"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (2, "2"),
        (1e-05, "1e-05"),
        ("full", "full"),
        ("4,5", "'4,5'"),
        ("true", "'true'"),
        ("4", "'4'"),
        ("", "''"),
        ("it's", r"'it\'s'"),
    ],
)
def test_override_text(value: bool | int | float | str | None, text: str) -> None:
    assert override_text("a.b", value, "plain") == f"a.b={text}"
    assert override_text("a.b", value, "++") == f"++a.b={text}"


@pytest.mark.stack
@example("\\'")
@example("a\\")
@example("\\\\' \\")
@given(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")) | st.sampled_from(" '\\\",=[]{}:"), max_size=12)
)
def test_hydra_reads_back_what_was_written(value: bool | int | float | str | None) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    read = OverridesParser.create().parse_override(override_text("a.b", value, "+")).value()
    assert read == value
    assert type(read) is type(value)
