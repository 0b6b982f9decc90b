"""The emulation's operators against the vendor's: schemas of several torch_npu versions, and its own meta registrations.

The schemas that are kept are compared everywhere; the wheels only where they are in the cache.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from packaging.version import Version
from test_npu_ops_support import ops
from vendor_targets import ERRORS, METAS, Differing, Found

from conformance import docs
from conformance.errors import UsageFault
from conformance.npu import vendor
from conformance.npu.schemas import differences, facts_of, main, mistaken
from conformance.npu.vendor import FACTS, FETCH, LIBRARY, VERSIONS, declared, member, read_facts, wheel
from conformance.ranks import Job, RankServer
from conformance.report.operators_page import CALLED_BY, TESTED_IN, operators_page

pytestmark = pytest.mark.stack

ROOT = Path(__file__).parents[1]
KEPT = read_facts()
EMULATED = vendor.emulated_version()
NO_WHEEL = f"no wheel of torch_npu {{}} in the cache: {FETCH}"


def cached(version: str) -> Path:
    """Asked at each test, so that a wheel is never looked for when none is wanted."""
    return wheel(version) or pytest.skip(NO_WHEEL.format(version))


def registered() -> dict[str, str]:
    """Operator -> schema as the dispatcher has it, of everything in namespace npu."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("npu::"):
            text = str(schema).removeprefix("npu::")
            found[text.partition("(")[0]] = text
    return found


# What is kept, everywhere.


def test_what_is_registered_is_what_the_version_that_it_claims_declares() -> None:
    assert EMULATED in KEPT.declared
    assert ops.EXPORTS  # imported, and so registered
    assert registered().keys() == KEPT.schemas.keys() == vendor.emulated_schemas().keys()
    assert mistaken(registered(), KEPT.of(EMULATED), EMULATED) == []


def test_at_least_three_versions_are_compared_and_the_differences_are_those_that_are_kept() -> None:
    assert tuple(KEPT.declared) == VERSIONS
    assert len(VERSIONS) >= 3
    for version in VERSIONS:
        theirs = KEPT.of(version)
        assert theirs
        found = {op: differences(text, theirs[op]) for op, text in registered().items() if op in theirs}
        assert {op: lines for op, lines in found.items() if lines} == KEPT.differences[version]


FAULTS: dict[str, tuple[str, str, str, str]] = {
    "default": ("npu_rms_norm", "epsilon=1e-06", "epsilon=1e-05", "epsilon's default is 1e-06, not 1e-05"),
    "no_default": ("npu_swiglu", "int dim=-1", "int dim", "dim's default is -1, not absent"),
    "text_default": ("npu_rotary_mul", "'half'", "'interleave'", "rotary_mode's default is 'half', not 'interleave'"),
    "dropped_argument": ("npu_rms_norm_backward", ", Tensor rstd", "", "has also rstd"),
    "added_argument": ("npu_swiglu_backward", "Tensor input", "Tensor input, Tensor x", "lacks x"),
    "renamed_argument": ("npu_dtype_cast", "Tensor input", "Tensor self", "lacks self; has also input"),
    "order": (
        "npu_swiglu_backward",
        "Tensor grad_output, Tensor input",
        "Tensor input, Tensor grad_output",
        "the order is grad_output",
    ),
    "type": ("npu_dtype_cast", "int dtype", "ScalarType dtype", "dtype's type is int, not ScalarType"),
    "optional": ("npu_grouped_matmul", "int? group_type=None", "int group_type=0", "group_type's type is Optional[int], not int"),
    "list": ("empty_with_swapped_memory", "int[] size", "int[2] size", "int[] size"),
    "by_keyword": ("npu_all_gather_base_mm", "*, ", "", "bias's way of passing is by keyword only, not by position"),
    "returns_fewer": ("npu_rms_norm", "(Tensor, Tensor)", "Tensor", "returns 2 values, not 1"),
    "returns_more": ("npu_fusion_attention_grad", "Tensor)", "Tensor, Tensor)", "returns 5 values, not 6"),
    "returns_other": ("get_npu_format", "-> int", "-> Tensor", "returns int, not Tensor"),
    "writes": ("npu_swiglu", "Tensor input", "Tensor(a!) input", "input's type is Tensor, not Tensor written to"),
    "overload": ("npu_grouped_matmul", "npu_grouped_matmul(", "npu_grouped_matmul.more(", "named npu_grouped_matmul, not"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_with_its_version(fault: str) -> None:
    op, old, new, words = FAULTS[fault]
    ours = vendor.emulated_schemas()
    head, found, tail = ours[op].rpartition(old)
    assert found, f"{old} is not in {ours[op]}"
    (line,) = mistaken({**ours, op: head + new + tail}, KEPT.of(EMULATED), EMULATED)
    assert line.startswith(f"{op}: in torch_npu {EMULATED} ")
    assert words in line


def test_an_operator_that_the_vendor_has_not_is_named() -> None:
    ours = {**vendor.emulated_schemas(), "npu_mine": "npu_mine(Tensor x) -> Tensor"}
    assert mistaken(ours, KEPT.of("2.13.0"), "2.13.0")[1:] == ["npu_mine: torch_npu 2.13.0 has no such operator"]


def test_what_is_no_schema_is_one_line() -> None:
    with pytest.raises(UsageFault, match=r"npu_x\(Thing a\) -> Tensor: not an operator schema"):
        differences("npu_x(Thing a) -> Tensor", "npu_x() -> Tensor")


# The library's strings.


def strings(*texts: str) -> bytes:
    return b"\x7fELF\0" + b"\0".join(text.encode() for text in texts) + b"\0"


def test_schemas_are_told_from_other_strings() -> None:
    right = [
        "npu_a(Tensor x) -> Tensor",
        "npu_a.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
        '_b(str s="", int[2] n=1) -> (int, int)',
    ]
    wrong = ["f(x) -> ", "see npu_a(Tensor x) -> Tensor", "npu_a(Tensor x)", "(x) -> y", "π(x) -> y", "a -> b"]
    found = declared(strings(*wrong, *right, right[0], *wrong))
    assert found == dict(zip(("npu_a", "npu_a.out", "_b"), right, strict=True))
    assert declared(strings(right[0])[:-1]) == {"npu_a": right[0]}, "the last string may end with the file"


def test_two_schemas_of_one_operator_are_a_fault() -> None:
    with pytest.raises(UsageFault, match="npu_a: declared twice"):
        declared(strings("npu_a(Tensor x) -> Tensor", "npu_a(Tensor y) -> Tensor"))


# The file that is kept, the cache and the commands.


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"written_by": 3}'])
def test_a_file_that_is_not_as_written_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "facts.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageFault, match=r"facts\.json: .*right form: python -m conformance\.npu\.schemas write") as raised:
        read_facts(path)
    assert "\n" not in str(raised.value)


def test_write_without_wheels_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = FACTS.read_bytes()
    done = CliRunner().invoke(main, ["write"])
    assert isinstance(done.exception, UsageFault)
    assert str(done.exception).endswith(f"right form: {FETCH}")
    assert FACTS.read_bytes() == before


def test_a_wrong_command_is_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "conformance.npu.schemas", "frobnicate"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: No such command 'frobnicate'; right form: python -m conformance.npu.schemas --help\n"


def test_a_download_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("--dest") + 1], "torch_npu-2.6.0-half.whl").write_bytes(b"half")
        return subprocess.CompletedProcess(command, 1, "", "Looking\nERROR: No matching distribution found\n")

    monkeypatch.setattr(vendor.subprocess, "run", pip)
    with pytest.raises(UsageFault, match=r"torch_npu==2\.6\.0: pip download failed: ERROR: No matching distribution found"):
        vendor.fetch("2.6.0")
    assert list(vendor.cache().iterdir()) == []


def test_a_download_is_moved_into_the_cache_and_not_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = []

    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        runs.append(command)
        Path(command[command.index("--dest") + 1], "torch_npu-2.6.0-whole.whl").write_bytes(b"whole")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(vendor.subprocess, "run", pip)
    assert vendor.fetch("2.6.0") == vendor.fetch("2.6.0") == wheel("2.6.0")
    assert [path.name for path in vendor.cache().iterdir()] == ["torch_npu-2.6.0-whole.whl"]
    assert len(runs) == 1


def test_a_broken_wheel_is_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "torch_npu-2.6.0-x.whl"
    broken.write_bytes(b"PK not a zip")
    with pytest.raises(UsageFault, match=f"not a whole wheel .*right form: remove it, then {FETCH}"):
        member(broken, LIBRARY)
    with zipfile.ZipFile(broken, "w") as archive:
        archive.writestr("other", "")
    with pytest.raises(UsageFault, match=f"has no {LIBRARY}"):
        member(broken, LIBRARY)


# The page.


def test_the_committed_page_is_as_generated() -> None:
    assert (docs.DOCS / "npu-operators.md").read_text(encoding="utf-8") == operators_page(KEPT), "python -m conformance docs"


def test_the_page_lists_every_operator_and_follows_the_facts() -> None:
    page = operators_page(KEPT)
    assert all(f"\n| `{op}` |" in page for op in vendor.emulated_schemas())
    assert "| `npu_mm_all_reduce_base` | `matmul_all_reduce` | ≠ | ≠ | = | ≠ |" in page
    assert "| `npu_moe_token_permute_grad` | `moe_permute` | – | = | = | = |" in page
    other = KEPT.model_copy(update={"differences": {**KEPT.differences, "2.10.0": {"npu_rms_norm": ["lacks x"]}}})
    assert "| `npu_rms_norm` | `rms_norm` | = | = | ≠ | = |" in operators_page(other)


def test_the_page_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from conformance import docs; assert 'npu-operators.md' in docs.pages()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_no_family_calls_is_called_by_the_file_that_is_named() -> None:
    assert CALLED_BY.keys() | TESTED_IN.keys() == vendor.emulated_schemas().keys()
    assert not CALLED_BY.keys() & TESTED_IN.keys()
    for op, file in TESTED_IN.items():
        # A backward operator is called by autograd, and its forward operator by name.
        called = op.partition(".")[0].removesuffix("_backward")
        assert f"npu.{called}(" in (ROOT / file).read_text(encoding="utf-8"), op


# The wheels, where they are in the cache.


@pytest.mark.parametrize("version", VERSIONS)
def test_the_facts_are_those_of_the_wheel(version: str) -> None:
    found = facts_of({version: declared(member(cached(version), LIBRARY))})
    assert found.declared[version] == KEPT.declared[version]
    assert found.others[version] == KEPT.others[version]
    assert found.differences[version] == KEPT.differences[version]
    assert mistaken(found.of(version), KEPT.of(version), version) == []
    assert found.of(version).keys() == KEPT.of(version).keys()


# Meta registrations. A registration of ours stands in for the vendor's, so that the comparison is seen to fail everywhere.

WRONG = """
from torch.library import Library, impl
from torch_npu.utils._error_code import ErrCode
import torch, torch_npu
m, other = Library("npu", "IMPL", "Meta"), Library("aten", "IMPL", "Meta")
mark = torch.ops.npu.npu_of_the_vendors.default
@impl(m, "npu_swiglu")
def shape(x, dim=-1): return torch.empty_like(x)
@impl(m, "npu_rms_norm")
def dtype(x, gamma, epsilon=1e-6):
    return torch.empty_like(x), x.new_empty((*x.shape[:-gamma.dim()], *[1] * gamma.dim()), dtype=torch.int8)
@impl(m, "npu_rms_norm_backward")
def count(dy, x, gamma, rstd): return torch.empty_like(x)
@impl(m, "npu_rotary_mul")
def right(x, r1, r2, mode="half", rotate=None): return torch.empty_like(x)
@impl(m, "npu_dtype_cast")
def refuses(x, dtype, input_dtype=None): raise ValueError(ErrCode)
@impl(other, "npu_swiglu_backward")
def elsewhere(*_): return None
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The families' named cases on two ranks, held against the cached wheels from the emulated version on, and a wrong one."""
    planted = tmp_path_factory.mktemp("wheel") / "torch_npu-0-x.whl"
    with zipfile.ZipFile(planted, "w") as archive:
        archive.writestr(METAS, WRONG)
        archive.writestr(ERRORS, "ErrCode = 'refused'")
    wheels = {v: path for v in VERSIONS if Version(v) >= Version(EMULATED) and (path := wheel(v))}
    with RankServer("vendor_targets:preload") as server:
        server.start()
        report = server.run(Job("vendor", "vendor_targets:run", {**wheels, "planted": planted}, 2, 240.0))
    assert report.ok, report.reason
    value = report.ranks[0].value
    assert isinstance(value, Found)
    return value


def test_the_families_call_what_the_page_says(found: Found) -> None:
    inner = "_npu_moe_token_unpermute_with_routing_map"
    # The public one is its composition and never reaches the recorder; no family calls the inner one itself.
    assert not any(f"npu.{inner}(" in path.read_text("utf-8") for path in (ROOT / "conformance/operators").glob("*.py"))
    called = {**found.families, inner[1:]: found.families[inner]}
    assert {op: tuple(sorted(names)) for op, names in called.items()} == CALLED_BY


def test_a_wrong_registration_is_caught_in_shape_dtype_and_count(found: Found) -> None:
    planted = found.confirmed["planted"]
    assert planted.agreeing.keys() == {"npu_rotary_mul"}
    assert {differing.op for differing in planted.differing} == {
        "npu_swiglu",
        "npu_rms_norm",
        "npu_rms_norm_backward",
        "npu_dtype_cast",
    }
    assert {d.theirs for d in planted.differing if d.op == "npu_dtype_cast"} == {"ValueError: refused"}
    assert "npu_swiglu_backward" in planted.unregistered


def _width_of_queries(call: Differing) -> bool:
    """2.10.0 gives the output qk's head width where v's differs. 2.13.0 gives it v's, as the emulation does."""
    assert not isinstance(call.theirs, str)
    theirs, ours = call.theirs[0], call.ours[0]
    return call.theirs[1:] == call.ours[1:] and theirs[0][:-1] == ours[0][:-1] and theirs[1] == ours[1]


def _no_tokens(call: Differing) -> bool:
    """It divides by the number of tokens, so that it has no answer for none."""
    return str(call.theirs).startswith("ZeroDivisionError") and call.ours[0][0][0] == 0


Explanation = Callable[[Differing], bool]
#: Operators that the wheels have no registration for.
UNREGISTERED = {"npu_format_cast", "get_npu_format", "empty_with_swapped_memory"}
#: Operators that cannot be called: a composition, whose inner one is called, and one that the vendor refuses without `out`.
NOT_CALLED = {"npu_moe_token_unpermute_with_routing_map", "npu_apply_adam_w"}
#: Where the vendor's registration and the emulation differ, and why. Strict: each must be seen, and no other.
EXPLAINED: dict[str, dict[str, Explanation]] = {
    "2.10.0": {
        "npu_fusion_attention": _width_of_queries,
        "npu_moe_token_permute_with_routing_map": _no_tokens,
    },
    "2.13.0": {"npu_moe_token_permute_with_routing_map": _no_tokens},
}


@pytest.mark.parametrize("version", EXPLAINED)
def test_the_vendors_registrations_give_the_emulations_shapes_and_dtypes(found: Found, version: str) -> None:
    cached(version)
    confirmed = found.confirmed[version]
    assert confirmed.unregistered == UNREGISTERED
    assert confirmed.agreeing.keys() == vendor.emulated_schemas().keys() - UNREGISTERED - NOT_CALLED
    for differing in confirmed.differing:
        explained = EXPLAINED[version].get(differing.op)
        assert explained is not None, differing
        assert explained(differing), differing
    assert {differing.op for differing in confirmed.differing} == EXPLAINED[version].keys()


def test_no_version_from_the_emulated_one_on_is_left_unexplained() -> None:
    assert list(EXPLAINED) == [version for version in VERSIONS if Version(version) >= Version(EMULATED)]
