"""MindSpeed for a stack: from MINDSPEED_HOME, from a clone that has the branch, from the address, or none and said so."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from conformance.checkout import mindspeed_for
from conformance.errors import UsageFault
from conformance.stackfile import StackFile


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A repository with MindSpeed on the branches `new` and `old`, and something else on `other`."""
    root = tmp_path / "upstream"
    (root / "mindspeed").mkdir(parents=True)
    git(root, "init", "--initial-branch", "other")
    (root / "README").touch()
    git(root, "add", ".")
    git(root, "commit", "-m", "other")
    for branch in ("old", "new"):
        git(root, "checkout", "-b", branch)
        (root / "mindspeed").mkdir(exist_ok=True)
        (root / "mindspeed" / "megatron_adaptor.py").write_text(branch)
        git(root, "add", ".")
        git(root, "commit", "-m", branch)
    return root


def stack(address: object, branch: str) -> StackFile:
    return StackFile("s", {}, (str(address), branch), ())


def branch_in(home: Path | None) -> str:
    assert home is not None
    return (home / "mindspeed" / "megatron_adaptor.py").read_text()


def test_mindspeed_home_of_that_branch_is_taken_as_it_is(upstream: Path, tmp_path: Path) -> None:
    found = mindspeed_for(stack("nowhere", "new"), tmp_path / "cache", {"MINDSPEED_HOME": str(upstream)})
    assert found.home == upstream
    assert not (tmp_path / "cache").exists()


def test_another_branch_of_the_clone_that_mindspeed_home_names(upstream: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "-b", "new", str(upstream), str(clone)], check=True)
    found = mindspeed_for(stack("nowhere", "old"), tmp_path / "cache", {"MINDSPEED_HOME": str(clone)})
    assert branch_in(found.home) == "old"
    assert branch_in(clone) == "new", "the user's clone is left as it is"
    again = mindspeed_for(stack("nowhere", "old"), tmp_path / "cache", {"MINDSPEED_HOME": str(clone)})
    assert again.home == found.home
    assert "fetched before" in again.said


def test_by_git_from_the_address(upstream: Path, tmp_path: Path) -> None:
    found = mindspeed_for(stack(upstream.as_uri(), "old"), tmp_path / "cache", {})
    assert branch_in(found.home) == "old"
    assert str(upstream) in found.said


@pytest.mark.parametrize("branch", ["other", "no-such-branch"])
def test_none_and_said_so(upstream: Path, tmp_path: Path, branch: str) -> None:
    found = mindspeed_for(stack(upstream, branch), tmp_path / "cache", {})
    assert found.home is None
    assert "this run is plain" in found.said
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_address_is_no_option(tmp_path: Path) -> None:
    """A stack's file may come from anybody: git must not read its address as an option."""
    mark = tmp_path / "mark"
    found = mindspeed_for(stack(f"--upload-pack=touch {mark}", "x"), tmp_path / "cache", {})
    assert found.home is None
    assert not mark.exists()


def test_a_stack_without_mindspeed(tmp_path: Path) -> None:
    assert mindspeed_for(StackFile("s", {}, None, ()), tmp_path, {}).home is None


def test_a_mindspeed_home_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="no MindSpeed source there"):
        mindspeed_for(stack("nowhere", "new"), tmp_path / "cache", {"MINDSPEED_HOME": str(tmp_path)})


def test_a_detached_checkout_of_another_commit_is_not_taken(upstream: Path, tmp_path: Path) -> None:
    git(upstream, "checkout", "--detach", "old")
    git(upstream, "commit", "--allow-empty", "-m", "somewhere else")
    found = mindspeed_for(stack("nowhere", "new"), tmp_path / "cache", {"MINDSPEED_HOME": str(upstream)})
    assert branch_in(found.home) == "new"
    assert found.home != upstream
