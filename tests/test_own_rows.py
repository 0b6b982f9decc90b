"""Rows, models and probes of other packages: `--matrix`, entry points, and whose fault it is when they fail."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance import extensions, models
from conformance.checks import _facts, watched
from conformance.errors import UsageFault
from conformance.extensions import ExtensionFault
from conformance.matrix import load_matrix
from conformance.results import read_results

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "docs" / "examples" / "own-rows"
ROWS = EXAMPLE / "my-rows.yaml"
POINTS = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]


def install(site: Path, name: str, module: str | None = None, **points: dict[str, str]) -> None:
    """A distribution with entry points, as pip would leave it: `models` and `probes` by name."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    text = ""
    for group, entries in points.items():
        text += f"[verl_mindspeed_conformance.{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items())
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    if module is not None:
        (site / f"{name}.py").write_text(module, encoding="utf-8")


def install_example(site: Path) -> Path:
    """The worked example, with the entry points of its own pyproject.toml; its module."""
    install(site, "own-rows", **{group.rpartition(".")[2]: entries for group, entries in POINTS.items()})
    shutil.copytree(EXAMPLE / "own_rows", site / "own_rows", ignore=shutil.ignore_patterns("__pycache__"))
    return site / "own_rows" / "__init__.py"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of packages on the path of this process, which nothing remembers afterwards."""
    before = set(sys.modules)
    remembered = (extensions.entry_points, models.load)
    for cached in remembered:
        cached.cache_clear()
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield tmp_path / "site"
    for cached in remembered:
        cached.cache_clear()
    for name in set(sys.modules) - before:
        if name.startswith("own"):
            del sys.modules[name]


def run(*arguments: str, site: Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MINDSPEED_HOME": "", "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = ROWS.read_text(encoding="utf-8")
    assert text.count(old) == 1, old
    path = tmp_path / "rows.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


# Names in a matrix


def test_the_example_is_read_with_its_package_and_refused_without(site: Path) -> None:
    with pytest.raises(
        UsageFault, match=r"my-rows.yaml:\d+: row 'allgather': key 'model': unknown model 'moe8'.*did you mean 'moe'"
    ):
        load_matrix(ROWS)
    install_example(site)
    extensions.entry_points.cache_clear()
    (row,) = load_matrix(ROWS).rows
    assert row.model == "moe8"
    assert models.load("moe8").config["num_experts"] == 8
    assert models.names() == ("dense", "mla", "moe", "moe8")


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("model: moe8", "model: moe88", r":11: row 'allgather': key 'model': unknown model 'moe88'; right form: .* 'moe8'\?$"),
        ("dispatcher.class", "dispatch.class", r":25: .*unknown fact family 'dispatch'; right form: .* 'dispatcher'\?$"),
        ("dispatcher.class", "dispatcher.a-b", r":25: .*'dispatcher.a-b' is not a fact; right form: dispatcher\. and then "),
        ("dispatcher.class", "dispatcher", r":25: .*unknown fact family 'dispatcher'"),
    ],
)  # fmt: skip
def test_unknown_names_have_their_line(site: Path, tmp_path: Path, old: str, new: str, wanted: str) -> None:
    install_example(site)
    path = changed(tmp_path, old, new)
    with pytest.raises(UsageFault) as caught:
        load_matrix(path)
    assert re.search(wanted, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("points", "wanted"),
    [
        ({"models": {"moe": "own:A"}}, r"entry point moe = own:A \(own 1.0\): this suite has 'moe' itself; right form: "),
        ({"probes": {"groups": "own:f"}}, r"entry point groups = own:f \(own 1.0\): this suite has 'groups' itself"),
        ({"models": {"../x": "own:A"}}, r"entry point \.\./x = own:A \(own 1.0\): '\.\./x' is no name"),
        ({"probes": {"a-b": "own:f"}}, r"'a-b' is no name for this; right form: a-z, then"),
    ],
)  # fmt: skip
def test_names_that_an_entry_point_may_not_have(site: Path, points: dict[str, dict[str, str]], wanted: str) -> None:
    install(site, "own", **points)
    with pytest.raises(UsageFault, match=wanted):
        load_matrix()


def test_two_packages_with_one_name(site: Path) -> None:
    install(site, "own1", probes={"mine": "own1:f"})
    install(site, "own2", probes={"mine": "own2:f"})
    with pytest.raises(UsageFault, match=r"own[12] 1.0\): entry point mine = own[12]:f \(own[12] 1.0\) has that name, too"):
        load_matrix()


# Models


MODULE = """
from pathlib import Path
HERE = Path(__file__).parent
as_text = str(HERE / "fixture.json")
def as_function():
    return HERE / "fixture.json"
def raises():
    raise RuntimeError("planted")
gone = HERE / "gone.json"
number = 7
broken = HERE / "broken.json"
"""


@pytest.mark.parametrize("value", ["as_text", "as_function"])
def test_a_model_is_a_path_or_a_function_that_returns_one(site: Path, value: str) -> None:
    install(site, "own", MODULE, models={"mine": f"own:{value}"})
    shutil.copy(EXAMPLE / "own_rows" / "moe8.json", site / "fixture.json")
    assert models.load("mine").config["num_experts"] == 8
    assert models.load("mine").name == "mine"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("raises", r"^entry point mine = own:raises \(own 1.0\): RuntimeError: planted \(own.py:8\)$"),
        ("absent", r"^entry point mine = own:absent \(own 1.0\): AttributeError: "),
        ("gone", r"^entry point mine = own:gone \(own 1.0\): gives '.*gone.json'; right form: the path of a fixture"),
        ("number", r"^entry point mine = own:number \(own 1.0\): gives '7'; right form: the path"),
        ("broken", r"/broken.json: not a model fixture"),
    ],
)
def test_a_model_that_is_none(site: Path, value: str, wanted: str) -> None:
    install(site, "own", MODULE, models={"mine": f"own:{value}"})
    (site / "broken.json").write_text('{"seed": 1}', encoding="utf-8")
    with pytest.raises(UsageFault) as caught:
        models.load("mine")
    assert re.search(wanted, str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


# Probes


PROBES = """
import math
def good(engine):
    return {"name": engine.name, "a.b": 2, "half": 0.5}
def raises(engine):
    raise AssertionError("planted\\nin two lines")
def text(engine):
    return "no mapping"
def bad_key(engine):
    return {"a b": 1}
def bad_value(engine):
    return {"a": [1]}
def not_finite(engine):
    return {"a": math.nan}
"""


def test_the_facts_of_a_probe_carry_its_family(site: Path) -> None:
    install(site, "own", PROBES, probes={"mine": "own:good", "other": "own:raises"})
    facts, faults = extensions.probe(SimpleNamespace(name="e"), {"mine"})
    assert facts == {"mine.name": "e", "mine.a.b": 2, "mine.half": 0.5}
    assert faults == {}, "nobody asked for the other family"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("raises", r"entry point mine = own:raises \(own 1.0\): AssertionError: planted \(own.py:6\)"),
        ("absent", r"entry point mine = own:absent \(own 1.0\): AttributeError: .*"),
        ("text", r"entry point mine = own:text \(own 1.0\): TypeError: returned str; right form: a mapping .*"),
        ("bad_key", r".*'a b' is no name of a fact; right form: .*"),
        ("bad_value", r".*a is '\[1\]' \(list\); right form: a finite number or text.*"),
        ("not_finite", r".*a is 'nan' \(float\); right form: a finite number or text.*"),
    ],
)
def test_a_probe_that_fails_is_named_and_leaves_the_others_alone(site: Path, value: str, wanted: str) -> None:
    install(site, "own", PROBES, probes={"mine": f"own:{value}", "other": "own:good"})
    facts, faults = extensions.probe(SimpleNamespace(name="e"), {"mine", "other"})
    assert set(facts) == {"other.name", "other.a.b", "other.half"}
    assert list(faults) == ["mine"]
    assert re.fullmatch(wanted, faults["mine"]), faults


def test_a_probe_is_called_where_a_row_asks_for_it_and_nowhere_else(site: Path) -> None:
    install_example(site)
    watch = watched([*load_matrix().rows, *load_matrix(ROWS).rows], "plain")
    asked = {key for key, facts in watch.items() if any(fact.startswith("dispatcher.") for fact in facts)}
    assert asked == {("actor", "moe8"), ("ref", "moe8")}


def test_a_failed_probe_concerns_the_rows_whose_evidence_rests_on_it() -> None:
    ranks = [SimpleNamespace(value=SimpleNamespace(rank=i, facts={"groups.tp": 2}, probe_faults={"mine": "why"})) for i in (0, 1)]
    report: Any = SimpleNamespace(ranks=ranks)
    other: Any = [SimpleNamespace(fact="groups.tp")]
    assert _facts(report, other) == [{"groups.tp": 2}, {"groups.tp": 2}]
    mine: Any = [*other, SimpleNamespace(fact="mine.a")]
    with pytest.raises(ExtensionFault, match="why on rank 0"):
        _facts(report, mine)


# `--matrix`


def collected(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]


def test_only_the_rows_of_the_other_matrix_are_collected(tmp_path: Path) -> None:
    install_example(tmp_path)
    names = collected(run("conformance", "--collect-only", "-q", "--matrix", str(ROWS), site=tmp_path))
    assert len(names) == 8
    assert all("[allgather-" in name for name in names), "neither other rows nor operators"


def test_an_installed_package_has_no_rows_but_runs_others(tmp_path: Path) -> None:
    """The package alone, elsewhere, as a wheel leaves it: no matrix, but models and stacks."""
    install_example(tmp_path / "site")
    shutil.copytree(ROOT / "conformance", tmp_path / "site" / "conformance", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "empty").mkdir()
    arguments = ("--pyargs", "conformance", "-p", "conformance.plugin", "--collect-only", "-q")
    without = run(*arguments, site=tmp_path / "site", cwd=tmp_path / "empty")
    assert without.returncode == 2
    assert "no matrix.yaml here: an installed package has no rows; right form: --matrix FILE" in without.stdout + without.stderr
    assert "Traceback" not in without.stdout + without.stderr
    names = collected(run(*arguments, "--matrix", str(ROWS), site=tmp_path / "site", cwd=tmp_path / "empty"))
    assert len(names) == 8


def test_all_data_of_the_package_is_in_a_wheel() -> None:
    """What the build takes along: files that a pattern finds from a directory that can be a package."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    patterns = tool["setuptools"]["package-data"]["*"]
    package = ROOT / "conformance"
    walk = [(Path(d), names) for d, _, names in os.walk(package, followlinks=True) if "__pycache__" not in d]
    importable = {d for d, _ in walk if all(part.isidentifier() for part in d.relative_to(ROOT).parts)}
    taken = {file for d in importable for pattern in patterns for file in d.glob(pattern)}
    files = {d / name for d, names in walk for name in names}
    assert {f for f in files if f.suffix not in (".py", ".pyc")} - taken == set()
    assert package / "fixtures" / "dense.json" in taken


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--matrix", "none.yaml"), ("none.yaml: cannot be read",)),
        (("--matrix", str(ROWS), "--row", "tp"), ("--row tp: no such row; right form: one of allgather",)),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    install_example(tmp_path)
    done = run("conformance", "--collect-only", *arguments, site=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert "Traceback" not in output
    assert [line for line in output.splitlines() if all(word in line for word in words)], output


def test_the_list_of_known_issues_is_the_one_beside_the_matrix(tmp_path: Path) -> None:
    install_example(tmp_path / "site")
    rows = shutil.copy(ROWS, tmp_path / "rows.yaml")
    arguments = ("conformance", "--collect-only", "-q", "--matrix", str(rows))
    assert len(collected(run(*arguments, site=tmp_path / "site"))) == 8, "the suite's own list names rows that are not here"
    entry = (
        "issues:\n  - {row: tp, check: engaged, backend: plain, outcome: crash, contains: x, reason: r, link: 'https://a.org'}\n"
    )
    (tmp_path / "known_issues.yaml").write_text(entry, encoding="utf-8")
    done = run(*arguments, site=tmp_path / "site")
    assert done.returncode == 2
    assert "known_issues.yaml:2: row 'tp': key 'row': no such row" in done.stdout + done.stderr


def test_the_commands_speak_of_the_other_matrix_too(tmp_path: Path) -> None:
    install_example(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "conformance", *arguments]
        return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)

    done = command("--matrix", str(ROWS), "explain", "allgather")
    assert done.returncode == 0, done.stderr
    assert "override_transformer_config.moe_token_dispatcher_type=allgather" in done.stdout
    done = command("--matrix", str(ROWS), "explain", "tp")
    assert (done.returncode, done.stderr) == (2, "error: tp: no such row; right form: one of allgather\n")


# Real runs


@pytest.mark.stack
def test_the_example_runs_and_stays_out_of_the_published_reports(tmp_path: Path) -> None:
    install_example(tmp_path / "site")
    reports = tmp_path / "reports"
    arguments = ("conformance", "--backend", "plain", "--matrix", str(ROWS), "--reports", str(reports))
    done = run(*arguments, site=tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in reports.iterdir()] == ["runs"]
    results = read_results(next((reports / "runs").iterdir()))
    assert results.header.matrix_sha256 == hashlib.sha256(ROWS.read_bytes()).hexdigest()
    assert results.header.rows == ("allgather",)
    assert {record.outcome for record in results.checks} == {"pass"}
    seen = [line for record in results.checks for line in record.detail.get("evidence", ()) if "dispatcher.class" in line]  # type: ignore[union-attr, operator]
    assert len(seen) == 4, "on and off, for actor and ref"
    assert all(str(line).startswith("yes") for line in seen)
    page = next((reports / "runs").iterdir()) / "support-table.md"
    assert "MoE allgather dispatcher" in page.read_text(encoding="utf-8")


@pytest.mark.stack
def test_a_probe_that_raises_is_our_users_error_and_not_upstreams(tmp_path: Path) -> None:
    module = install_example(tmp_path / "site")
    good = module.read_text(encoding="utf-8")
    planted = good.replace("    layers = [", '    assert False, "planted"\n    layers = [', 1)
    assert planted != good
    module.write_text(planted, encoding="utf-8")
    reports = tmp_path / "reports"
    chosen = "ref and (engaged or float32)"
    arguments = ("conformance", "--backend", "plain", "--matrix", str(ROWS), "--reports", str(reports), "-k", chosen)
    done = run(*arguments, site=tmp_path / "site")
    assert done.returncode == 1, done.stdout + done.stderr
    outcomes = {record.check: record for record in read_results(next((reports / "runs").iterdir())).checks}
    assert outcomes["engaged"].outcome == "error"
    assert "entry point dispatcher = own_rows:dispatcher (own-rows 1.0): AssertionError: planted" in outcomes["engaged"].summary
    assert outcomes["engaged"].exception is None, "no upstream frame is blamed"
    assert outcomes["parity"].outcome == "pass", "parity does not rest on the probe"


@pytest.mark.stack
def test_a_model_that_transformers_cannot_build_is_one_line(tmp_path: Path) -> None:
    module = install_example(tmp_path / "site")
    fixture = module.with_name("moe8.json")
    text = fixture.read_text(encoding="utf-8")
    fixture.write_text(text.replace("Qwen3MoeForCausalLM", "Qwen3MooForCausalLM"), encoding="utf-8")
    arguments = (
        "conformance",
        "--backend",
        "plain",
        "--matrix",
        str(ROWS),
        "--reports",
        str(tmp_path / "r"),
        "-k",
        "ref and taken",
    )
    done = run(*arguments, site=tmp_path / "site")
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert "model 'moe8': transformers cannot build it: AttributeError: " in output
    assert "Traceback" not in output
