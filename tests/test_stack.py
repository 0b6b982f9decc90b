"""The stack: MindSpeed found or said to be missing, pins read, missing packages named, the wrong megatron-core refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from conformance import stack
from conformance.errors import UsageFault
from conformance.ranks import Frame, Raised
from conformance.results import Package
from conformance.stack import NEEDED, MindSpeed, broken_line, core_mismatch, find_mindspeed, require, untested
from conformance.stackfile import DEFAULT_STACK, read_stack


def make_mindspeed(root: Path) -> Path:
    (root / "mindspeed").mkdir(parents=True)
    (root / "mindspeed" / "__init__.py").touch()
    (root / "mindspeed" / "megatron_adaptor.py").touch()
    return root


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Have importlib.metadata know these distributions and no others."""

    monkeypatch.setattr(stack, "_core_on_path", lambda: None)

    def install(versions: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return install


def has_no_mindspeed(_name: str) -> ModuleSpec | None:
    return None


@pytest.mark.parametrize("content", [None, "mindspeed", "mindspeed/other.py"])
def test_mindspeed_home_that_is_none_gives_one_line(tmp_path: Path, content: str | None) -> None:
    home = tmp_path / "clone"
    if content:
        (home / content).mkdir(parents=True)
    with pytest.raises(UsageFault) as fault:
        find_mindspeed({"MINDSPEED_HOME": str(home)})
    text = str(fault.value)
    assert "\n" not in text
    assert text.startswith(f"MINDSPEED_HOME={home}: no MindSpeed source there")
    assert "right form" in text


def test_the_package_directory_itself_is_not_the_home(tmp_path: Path) -> None:
    home = make_mindspeed(tmp_path / "MindSpeed")
    with pytest.raises(UsageFault, match="no MindSpeed source there"):
        find_mindspeed({"MINDSPEED_HOME": str(home / "mindspeed")})


def test_checkout_tells_branch_commit_and_core_series(tmp_path: Path) -> None:
    home = make_mindspeed(tmp_path / "MindSpeed")
    git(home, "init", "-b", "core_r0.16.0")
    git(home, "add", ".")
    git(home, "commit", "-m", "a")
    found = find_mindspeed({"MINDSPEED_HOME": str(home)})
    assert found is not None
    assert (found.home, found.branch, found.core_series) == (home.resolve(), "core_r0.16.0", "0.16")
    assert found.commit is not None
    assert len(found.commit) == 12


def test_source_that_is_no_checkout_of_its_own_has_no_branch(tmp_path: Path) -> None:
    home = make_mindspeed(tmp_path / "project" / "venv" / "site-packages")
    git(tmp_path / "project", "init", "-b", "core_r0.16.0")
    git(tmp_path / "project", "commit", "--allow-empty", "-m", "a")
    assert find_mindspeed({"MINDSPEED_HOME": str(home)}) == MindSpeed(home.resolve(), None, None)


def test_no_home_and_nothing_installed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", has_no_mindspeed)
    assert find_mindspeed({}) is None
    assert find_mindspeed({"MINDSPEED_HOME": ""}) is None


def test_installed_mindspeed_is_found_and_a_placeholder_of_its_name_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_mindspeed(tmp_path / "lib")
    spec = ModuleSpec("mindspeed", None, origin=str(root / "mindspeed" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
    found = find_mindspeed({})
    assert found is not None
    assert found.home == root.resolve()
    (root / "mindspeed" / "megatron_adaptor.py").unlink()
    assert find_mindspeed({}) is None


def test_a_detached_checkout_is_named_by_a_branch_at_its_commit(tmp_path: Path) -> None:
    root = make_mindspeed(tmp_path / "clone")
    git(root, "init", "--initial-branch", "2.3.0_core_r0.12.1")
    git(root, "add", ".")
    git(root, "commit", "-m", "one")
    git(root, "branch", "another")
    git(root, "checkout", "--detach")
    found = find_mindspeed({"MINDSPEED_HOME": str(root)})
    assert found is not None
    assert found.branch == "2.3.0_core_r0.12.1"
    git(root, "commit", "--allow-empty", "-m", "two")
    found = find_mindspeed({"MINDSPEED_HOME": str(root)})
    assert found is not None
    assert found.branch is None


@pytest.mark.parametrize(
    ("branch", "series"),
    [("core_r0.16.0", "0.16"), ("2.3.0_core_r0.12.1", "0.12"), ("master", None), (None, None), ("core_r16", None)],
)
def test_core_series_is_what_the_branch_states(branch: str | None, series: str | None) -> None:
    assert MindSpeed(Path(), branch, None).core_series == series


@pytest.mark.parametrize(
    ("branch", "version", "matches"),
    [
        ("core_r0.16.0", "0.16.1", True),
        ("core_r0.16.0", "0.16.0rc1", True),
        ("core_r0.12.1", "0.16.1", False),
        ("core_r0.1.0", "0.16.1", False),  # 0.1 is no beginning of 0.16
        ("master", "0.16.1", True),
        ("core_r0.16.0", None, True),
    ],
)
def test_core_mismatch(installed: Callable[[dict[str, str]], None], branch: str, version: str | None, matches: bool) -> None:
    installed({"megatron-core": version} if version else {})
    line = core_mismatch(MindSpeed(Path("/clone"), branch, "abc"))
    assert (line is None) is matches
    if line is not None:
        assert "\n" not in line
        assert branch in line
        assert f"installed is megatron-core {version}" in line
        assert "right form" in line
        assert "--force" in line


def test_a_megatron_core_earlier_on_the_path_counts(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 1\n")
    code = (
        "from pathlib import Path\n"
        "from conformance.stack import MindSpeed, core_mismatch\n"
        "print(core_mismatch(MindSpeed(Path(), 'core_r0.16.0', None)))"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=True)
    assert "installed is megatron-core 0.12.1" in done.stdout


SITE = "/venv/lib/python3.11/site-packages"
VERL = (f"{SITE}/verl/workers/engine/base.py", "from tensordict import TensorDict")


@pytest.mark.parametrize(
    ("kind", "message", "frames", "name"),
    [
        ("SyntaxError", "invalid syntax (__init__.py, line 1)", [VERL], "tensordict"),
        (
            "ImportError",
            "libascend_x.so: cannot open",
            [VERL, (f"{SITE}/mbridge/__init__.py", "x()"), ("/lib/ctypes.py", "")],
            "mbridge",
        ),
        ("AttributeError", "no x", [VERL, (f"{SITE}/megatron/core/utils.py", "x")], "megatron-core"),
        ("AttributeError", "no x", [VERL, ("/clone/megatron/core/utils.py", "x")], "megatron-core"),
    ],
)
def test_a_broken_package_is_named_with_the_wanted_version(
    kind: str, message: str, frames: list[tuple[str, str]], name: str
) -> None:
    raised = Raised(kind, message, tuple(Frame(file, 1, "f", source) for file, source in frames), "", None)
    line = broken_line(raised)
    assert line.startswith(name)
    assert f"(wanted: {read_stack(DEFAULT_STACK).pins[name]}) is broken: {kind}: {message}; right form: " in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("kind", "message", "installed_is", "name", "said", "remedy"),
    [
        (
            "ModuleNotFoundError",
            "No module named 'megatron.training'",
            None,
            "megatron-core",
            "lacks what is imported from it",
            "",
        ),
        ("ImportError", "cannot import name 'X' from 'tensordict.nn' (a.py)", None, "tensordict", "lacks what is imported", ""),
        ("ImportError", "cannot import name 'X' from 'tensordict'", "0.1", "tensordict", "is broken", "--force-reinstall"),
        (
            "ModuleNotFoundError",
            "No module named 'tensordict'",
            "",
            "tensordict",
            "is not installed",
            "pip install 'tensordict==",
        ),
    ],
)
def test_a_package_that_lacks_something_is_not_called_broken(
    kind: str,
    message: str,
    installed_is: str | None,
    name: str,
    said: str,
    remedy: str,
    installed: Callable[[dict[str, str]], None],
) -> None:
    """`installed_is`: the version, None for the pinned one, "" for none. The raising frame is the importer's in each case."""
    pin = read_stack(DEFAULT_STACK).pins[name]
    version = next(iter(pin.specifier)).version if installed_is is None else installed_is
    installed({name: version} if version else {})
    line = broken_line(Raised(kind, message, (Frame(VERL[0], 1, "f", VERL[1]),), "", None))
    assert line.startswith(f"{name} {version}".strip())
    assert said in line
    assert ("right form" in line) is bool(remedy)
    assert remedy in line


def test_an_error_of_nobody_s_package_is_said_as_it_is() -> None:
    assert broken_line(Raised("OSError", "no space\nleft", (), "", None)) == "OSError: no space"


def test_a_checkout_with_changes_is_told(tmp_path: Path) -> None:
    home = make_mindspeed(tmp_path / "MindSpeed")
    git(home, "init", "-b", "core_r0.16.0")
    git(home, "add", ".")
    git(home, "commit", "-m", "a")
    (home / "notes.txt").touch()  # what nobody imports
    sound = find_mindspeed({"MINDSPEED_HOME": str(home)})
    (home / "mindspeed" / "megatron_adaptor.py").write_text("print('patched')\n")
    changed = find_mindspeed({"MINDSPEED_HOME": str(home)})
    assert sound is not None
    assert changed is not None
    assert changed.commit == f"{sound.commit}+changes"
    for found, lines in ((sound, 0), (changed, 1)):
        package = Package("mindspeed", "core_r0.16.0", None, found.commit)
        assert sum("changes of its own" in line for line in untested((package,))) == lines


@pytest.mark.parametrize("home", ["~nosuchuser/x", "x" * 5000, "a\0b", "loop"])
def test_a_home_that_is_no_path_is_told_in_one_line(tmp_path: Path, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageFault, match="no MindSpeed source there") as fault:
        find_mindspeed({"MINDSPEED_HOME": home})
    assert len(str(fault.value)) < 500


def test_every_missing_package_is_named_with_the_wanted_version(installed: Callable[[dict[str, str]], None]) -> None:
    pins = read_stack(DEFAULT_STACK).pins
    installed(dict.fromkeys(NEEDED, "1"))
    require()
    installed(dict.fromkeys([name for name in NEEDED if name not in ("verl", "megatron-core")], "1"))
    with pytest.raises(UsageFault) as fault:
        require()
    text = str(fault.value)
    assert "\n" not in text
    assert text.startswith(f"missing: {pins['verl']}, {pins['megatron-core']}; ")
    assert f"pip install -r stacks/{DEFAULT_STACK}.txt" in text
    installed({})
    with pytest.raises(UsageFault) as fault:
        require()
    assert all(str(pins[name]) in str(fault.value) for name in NEEDED)
