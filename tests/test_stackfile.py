"""The stacks' files: pins, where MindSpeed comes from, deviations; and what is untested."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from conformance import stackfile
from conformance.combinations import Found, compare, load_combinations
from conformance.errors import UsageFault
from conformance.results import Package
from conformance.stack import NEEDED, REPORTED, MindSpeed
from conformance.stackfile import DEFAULT_STACK, STACKS, StackFile, read_stack, require_stack, stack_of

Write = Callable[[str, str], None]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    """Write a stack's file into a directory that stands for stacks/."""
    monkeypatch.setattr(stackfile, "STACKS", tmp_path)
    return lambda name, text: (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8") and None


def test_unknown_stack_names_those_that_there_are() -> None:
    with pytest.raises(UsageFault, match=rf"stacks/nope\.txt: cannot be read .*there are: .*{DEFAULT_STACK}"):
        read_stack("nope")


@pytest.mark.parametrize("path", sorted(STACKS.glob("*.txt")), ids=lambda path: path.stem)
def test_stored_pins_are_exact(path: Path) -> None:
    for name, requirement in read_stack(path.stem).pins.items():
        assert [s.operator for s in requirement.specifier] == ["=="], f"{name} in {path.name}"


@pytest.mark.parametrize("name", stackfile.names())
def test_every_stack_pins_all_that_is_needed_and_names_its_mindspeed(name: str) -> None:
    stack = read_stack(name)
    assert set(NEEDED) <= set(stack.pins)
    assert set(NEEDED) <= set(REPORTED)
    assert stack.branch


def off_the_documents(stack: StackFile) -> set[str]:
    """What a stack pins otherwise than the newest combination that is documented for its line of verl and its MindSpeed."""
    pins = {name: str(pin.specifier).removeprefix("==") for name, pin in stack.pins.items()}
    line = Version(pins["verl"]).release[:2]
    wanted = next(
        c for c in load_combinations() if c.mindspeed == stack.branch and c.verl != "main" and Version(c.verl).release[:2] == line
    )
    found = [Found(name, version, None) for name, version in {**pins, "python": "3.11.0", "torch_npu": None}.items()]
    return {c.what.partition(":")[0] for c in compare(wanted, found, MindSpeed(Path(), stack.branch, None)) if not c.fits}


@pytest.mark.parametrize("name", stackfile.names())
def test_a_stack_declares_all_that_differs_from_the_documented_combination(name: str) -> None:
    stack = read_stack(name)
    declared = {d.of.name: d for d in stack.deviations if d.of is not None}
    assert off_the_documents(stack) == set(declared), "a line for each, and none for what is as documented"
    assert len(declared) == len(stack.deviations), "each says of which versions it is"
    for package, deviation in declared.items():
        version = str(stack.pins[package].specifier).removeprefix("==")
        assert stack.declared([Package(package, version)]) == (deviation.text,)
        assert deviation.text.startswith(f"{package} {version} for the documented ")


def test_comments_options_and_case_in_pins(write: Write) -> None:
    write("a", "# words\n\n--extra-index-url x\nMegatron_Core==0.16.1  # why\n")
    assert {name: str(r.specifier) for name, r in read_stack("a").pins.items()} == {"megatron-core": "==0.16.1"}


def test_the_comments_that_are_read(write: Write) -> None:
    write(
        "a",
        "# mindspeed: https://x.org/m.git core_r1\n# deviation: torch 2 for 1: why\n#deviation: more\n# not a deviation: no\n",
    )
    stack = read_stack("a")
    assert stack.mindspeed == ("https://x.org/m.git", "core_r1")
    assert stack.declared(()) == ("torch 2 for 1: why", "more")


@pytest.mark.parametrize("text", ["verl=0.9.1", "verl==", "==1", "../verl"])
def test_line_that_is_no_requirement_is_named(write: Write, text: str) -> None:
    write("broken", f"torch==2.13.0\n# comment\n{text}\n")
    with pytest.raises(UsageFault) as fault:
        read_stack("broken")
    assert str(fault.value).startswith(f"stacks/broken.txt:3: {text!r} is no requirement")
    assert "\n" not in str(fault.value)


def test_a_source_without_a_branch(write: Write) -> None:
    write("broken", "# mindspeed: https://x.org/m.git\n")
    with pytest.raises(UsageFault, match=r"stacks/broken\.txt:1: .*right form: mindspeed: ADDRESS BRANCH"):
        read_stack("broken")


def test_pins_that_are_no_text(tmp_path: Path, write: Write) -> None:
    write("binary", "")
    (tmp_path / "binary.txt").write_bytes(b"torch==2.13.0\n\xff\xfe\n")
    with pytest.raises(UsageFault) as fault:
        read_stack("binary")
    assert str(fault.value).startswith("stacks/binary.txt: ")
    assert "\n" not in str(fault.value)


def test_a_stack_is_known_by_its_verl(write: Write) -> None:
    write("old", "verl==0.7.1\n")
    write(DEFAULT_STACK, "verl==0.9.1\n")
    assert stack_of("0.7.1").name == "old"
    assert stack_of("0.9.1").name == DEFAULT_STACK
    assert stack_of("0.8.0").name == DEFAULT_STACK
    assert stack_of(None).name == DEFAULT_STACK


def test_what_is_untested(write: Write) -> None:
    write("s", "# mindspeed: a core_r0.16.0\ntorch==2.13.0\nverl==0.9.1\nmegatron-core==0.16.1\n")
    stack = read_stack("s")
    sound = (
        Package("torch", "2.13.0+cpu"),
        Package("verl", "0.9.1"),
        Package("mindspeed", "core_r0.16.0"),
        Package("numpy", "1"),
    )
    assert stack.untested(sound) == ()
    wrong = (Package("verl", "0.9.0"), Package("torch", "unknown"), Package("mindspeed", "master"))
    assert stack.untested(wrong) == (
        "verl 0.9.0 (the stack pins ==0.9.1)",
        "torch unknown (the stack pins ==2.13.0)",
        "MindSpeed branch master (the stack is tested with core_r0.16.0)",
    )


def test_another_stack_than_installed_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("s", "verl==0.7.0\nmegatron-core==0.12.1\n")
    for versions, word in (({}, "no verl"), ({"verl": "0.9.1"}, "verl 0.9.1"), ({"verl": "0.7.0"}, "no megatron-core")):
        monkeypatch.setattr(stackfile, "installed_version", versions.get)
        with pytest.raises(UsageFault, match=rf"--stack s: {word} is installed; right form: pip install -r stacks/s\.txt"):
            require_stack(read_stack("s"))
    monkeypatch.setattr(stackfile, "installed_version", {"verl": "0.7.0", "megatron-core": "0.12.1"}.get)
    require_stack(read_stack("s"))


def test_what_must_not_be_beside_the_stack_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance import stack

    monkeypatch.setattr(stack, "installed_version", lambda name: "3.7.1" if name == "triton" else None)
    assert stack.untested(()) == ("triton is installed: the suite stands in for it, and is tested without",)
    monkeypatch.setattr(stack, "installed_version", lambda _name: None)
    assert stack.untested(()) == ()


def test_a_deviation_holds_for_the_versions_that_it_names(write: Write) -> None:
    write("s", "# deviation[torch>=2.12]: why\nverl==0.7.0\n")
    stack = read_stack("s")
    assert stack.declared([Package("torch", "2.13.0+cpu")]) == ("why",)
    assert stack.declared([Package("torch", "2.8.0")]) == ()
    write("broken", "# deviation[torch>>2]: why\n")
    with pytest.raises(UsageFault, match=r"stacks/broken\.txt:1: 'torch>>2' is no requirement"):
        read_stack("broken")
