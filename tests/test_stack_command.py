"""`conformance stack`: what is installed, compared with the documented combinations, without importing any of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.combinations import COMBINATIONS, Combination, Found, compare, installed, lines, load_combinations
from conformance.errors import UsageFault
from conformance.schema import texts
from conformance.stack import REPORTED, MindSpeed

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTED = load_combinations()
NEWEST = DOCUMENTED[0]
MINDSPEED = MindSpeed(Path("MindSpeed"), "core_r0.16.0", "e4772499f7eb")
VERSIONS: dict[str, str | None] = {
    **dict.fromkeys(REPORTED, "1"),
    "python": "3.11.7",
    "torch": "2.10.0+cpu",
    "torch_npu": "2.10.0.post4",
    "verl": "0.9.0",
    "megatron-core": "0.16.1",
    "mindspeed": "core_r0.16.0 e4772499f7eb",
    "mbridge": "0.15.1",
    "transformers": "5.10.4",
}


def found(**versions: str | None) -> list[Found]:
    return [Found(name, version, "somewhere") for name, version in {**VERSIONS, **versions}.items()]


def said(source: MindSpeed | None = MINDSPEED, **versions: str | None) -> str:
    return "\n".join(lines(found(**versions), DOCUMENTED, source))


def unfit(combination: Combination, source: MindSpeed | None = MINDSPEED, **versions: str | None) -> list[str]:
    return [c.what for c in compare(combination, found(**versions), source) if not c.fits]


def test_a_documented_combination_is_called_one_whatever_the_build_label() -> None:
    assert "\ndocumented: verl 0.9.0 with MindSpeed core_r0.16.0 (install_guidance.rst:93-110)" in said()
    assert "not a documented combination" not in said()


@pytest.mark.parametrize(
    ("name", "version", "right"),
    [
        ("verl", "0.9.1", "python -m pip install verl==0.9.0"),
        ("verl", None, "python -m pip install verl==0.9.0"),
        ("megatron-core", "0.15.3", "python -m pip install 'megatron-core==0.16.*'"),
        ("torch", "2.13.0", "python -m pip install torch==2.10.0"),
        ("torch_npu", "2.9.0", "python -m pip install torch_npu==2.10.0.post2"),
        ("transformers", "5.9", "python -m pip install 'transformers==5.10.4'"),
        ("python", "3.9.1", "a Python >=3.10,<3.13"),
        ("mbridge", "a checkout", "python -m pip install 'mbridge==0.15.1'"),
    ],
)
def test_what_to_change(name: str, version: str | None, right: str) -> None:
    text = said(**{name: version})
    assert "not a documented combination; the nearest is verl 0.9.0 with MindSpeed core_r0.16.0" in text
    (what,) = unfit(NEWEST, **{name: version})
    assert what.startswith(f"{name}: {version or 'not installed'}, documented ")
    assert f"  {what}\n      to change it: {right}\n" in text


def test_mindspeed_is_known_by_branch_or_commit() -> None:
    assert not unfit(NEWEST)
    other = replace(MINDSPEED, branch="core_r0.15.3")
    (what,) = unfit(NEWEST, other, mindspeed="core_r0.15.3 e4772499f7eb")
    assert what == "mindspeed: core_r0.15.3 e4772499f7eb, documented core_r0.16.0"
    assert "git checkout core_r0.16.0" in said(other)
    assert len(unfit(NEWEST, None, mindspeed=None)) == 1
    by_commit = next(c for c in DOCUMENTED if c.mindspeed == "0c6c0cea")
    at_it = replace(MINDSPEED, branch=None, commit="0c6c0ceaffff")
    assert not [what for what in unfit(by_commit, at_it) if what.startswith("mindspeed")]
    nowhere = replace(MINDSPEED, branch=None, commit=None)
    assert [what for what in unfit(by_commit, nowhere) if what.startswith("mindspeed")]


def test_an_npu_package_that_is_missing_is_emulated_and_said_to_be() -> None:
    text = said(torch_npu=None)
    assert "\ndocumented: " in text
    assert "torch_npu is not installed: runs are on the emulated NPU; documented 2.10.0.post2 or 2.10.0.post4" in text
    assert "emulated" not in said()


def test_a_document_that_says_little_is_not_the_nearest_to_everything() -> None:
    assert "the nearest is verl 0.9.0 with MindSpeed core_r0.16.0" in said(None, verl="0.9.1", mindspeed=None, torch="2.13.0")


def test_each_documented_combination_is_recognised_as_itself() -> None:
    for wanted in DOCUMENTED:
        if wanted.verl == "main":
            continue  # no version tells a branch
        versions = {name: spec.removeprefix("==") for name, spec in wanted.packages.items()}
        for name, choices in (("torch", wanted.torch), ("torch_npu", wanted.torch_npu)):
            versions |= {name: choices[-1]} if choices else {}
        core = wanted.megatron_core.versions.removeprefix("==").replace("*", "1")
        mindspeed = MindSpeed(Path("x"), wanted.mindspeed, wanted.mindspeed)
        own = unfit(wanted, mindspeed, verl=wanted.verl, **{"megatron-core": core, **versions})
        assert own == [], wanted.title


def test_which_stack_the_suite_was_tested_with_is_said() -> None:
    assert "this suite is not tested so: " in said()
    assert "the stack is tested with core_r0.16.0" not in said(MINDSPEED), "a commit beside the branch is no other branch"
    assert "the stack is tested with core_r0.16.0" in said(replace(MINDSPEED, branch="master"))
    assert "verl is missing" in said(verl=None)
    assert "MindSpeed branch core_r0.12.0 is made for megatron-core 0.12.x" in said(replace(MINDSPEED, branch="core_r0.12.0"))


def test_nothing_of_the_stack_is_imported() -> None:
    program = (
        "import sys; from conformance.combinations import installed; found = installed(None);"
        "print([m for m in ('torch', 'verl', 'megatron.core', 'transformers', 'numpy') if m in sys.modules], len(found))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[]", str(len(REPORTED) + 1)]


@pytest.mark.stack
def test_what_is_installed_is_found_where_it_is() -> None:
    import importlib.metadata

    here = {f.name: f for f in installed(None)}
    assert here["verl"].version == importlib.metadata.version("verl")
    assert here["megatron-core"].path is not None
    assert (Path(here["megatron-core"].path) / "package_info.py").exists()
    given = {f.name: f for f in installed(MINDSPEED)}["mindspeed"]
    assert (given.version, given.path) == ("core_r0.16.0 e4772499f7eb", "MindSpeed")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('verl: "0.9.0"', "verl: 0.9", "combinations.yaml:7: row number 1: key 'verl': 0.9 is not text"),
        ("==0.16.*", "16", "'16' is not a version specifier"),
        ("  source: ", "  sauce: ", "unknown field 'sauce'; right form: did you mean 'source'?"),
    ],
)
def test_a_broken_table_is_told_in_one_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = COMBINATIONS.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "combinations.yaml").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UsageFault) as caught:
        load_combinations(tmp_path / "combinations.yaml")
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_table_names_its_schema() -> None:
    first = COMBINATIONS.read_text(encoding="utf-8").splitlines()[0]
    schema = first.removeprefix("# yaml-language-server: $schema=")
    assert (COMBINATIONS.parent / schema).read_text(encoding="utf-8") == texts()["combinations.schema.json"]
    assert json.loads(texts()["combinations.schema.json"])["required"] == ["combinations"]
