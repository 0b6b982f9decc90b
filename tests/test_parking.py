"""Set aside and brought back: the same modules, executed once; and nothing that MindSpeed would patch is set aside."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.backend import ENVIRONMENT, BackendSpec
from conformance.checks import watched
from conformance.lanes import Lanes
from conformance.matrix import load_matrix
from conformance.parking import Parked
from conformance.ranks import Job, RankServer
from conformance.runner import Case, Runner, results_of
from conformance.stack import find_mindspeed


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    root = tmp_path / "idle_one"
    (root / "sub").mkdir(parents=True)
    (root / "__init__.py").write_text("executed = []\n")
    (root / "sub" / "__init__.py").write_text("import idle_one\nidle_one.executed.append('sub')\n")
    (root / "later.py").write_text("import idle_one\nidle_one.executed.append('later')\n")
    (tmp_path / "idle_one_more.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield "idle_one"
    sys.meta_path[:] = finders
    for name in [n for n in sys.modules if n.startswith("idle_one")]:
        del sys.modules[name]


def test_an_import_brings_back_the_same_modules_unexecuted(package: str) -> None:
    sub = importlib.import_module("idle_one.sub")
    root = sys.modules[package]
    spec = root.__spec__
    Parked([package])
    assert package not in sys.modules
    assert "idle_one.sub" not in sys.modules
    assert importlib.import_module("idle_one.sub") is sub
    assert sys.modules[package] is root
    assert root.executed == ["sub"]
    assert root.__spec__ is spec
    assert root.sub is sub


def test_a_module_never_imported_is_still_found(package: str) -> None:
    root = importlib.import_module(package)
    Parked([package])
    later = importlib.import_module("idle_one.later")
    assert later.idle_one is root
    assert root.executed == ["later"]


def test_a_name_that_only_begins_alike_stays(package: str) -> None:
    importlib.import_module("idle_one_more")
    Parked([package])
    assert "idle_one_more" in sys.modules


@pytest.fixture(scope="module")
def lanes() -> Iterator[Lanes]:
    spec = BackendSpec("mindspeed", "emulated", find_mindspeed())
    found = Lanes([RankServer("conformance.backend:preload", spec, env=ENVIRONMENT)])
    found.start()
    yield found
    found.close()


def ask(lanes: Lanes, target: str, payload: object = None) -> object:
    report = lanes.want(lanes.plan(Job(target, f"parking_targets:{target}", payload, 1, 60)))
    assert report.ok, report.reason
    return report.ranks[0].value


@pytest.mark.stack
@pytest.mark.mindspeed
def test_nothing_that_mindspeed_patches_is_set_aside(lanes: Lanes) -> None:
    count = ask(lanes, "parked_count")
    assert isinstance(count, int)
    assert count > 1000
    assert ask(lanes, "patched_in_parked") == []
    assert ask(lanes, "patched_in_parked", "pandas")  # the fault that this would catch


@pytest.mark.stack
@pytest.mark.mindspeed
def test_a_step_is_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BackendSpec("mindspeed", "emulated", find_mindspeed())
    watch = watched(load_matrix().rows, "mindspeed")
    case = Case("actor", "dense", 1)
    found = []
    for preload in ("conformance.backend:preload", "parking_targets:preload_unparked"):
        monkeypatch.setattr("conformance.runner.PRELOAD", preload)
        with Runner(spec, watch) as runner:
            runner.start()
            (result,) = results_of(runner.step(case))
            found.append(result)
    with_parking, without = found
    assert with_parking.facts == without.facts
    assert with_parking.grad_norm == without.grad_norm
    assert with_parking.weights is not None
    assert without.weights is not None
    assert all((with_parking.weights[name] == without.weights[name]).all() for name in without.weights)
