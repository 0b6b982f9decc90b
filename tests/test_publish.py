"""Publishing: a run takes the place of the stack's last one whole, for two at once as well, and never another stack's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from result_sets import result_set

from conformance.matrix import load_matrix
from conformance.publish import publish, stack_name, write_tables
from conformance.results import FILE_NAME, ResultSet, encode

ROWS = load_matrix().rows


def write(results: ResultSet, directory: Path) -> Path:
    directory.mkdir(parents=True)
    lines = [results.header, *results.checks, *([results.footer] if results.footer else [])]
    (directory / FILE_NAME).write_bytes(b"".join(map(encode, lines)))
    write_tables(results, ROWS, directory)
    return directory


def test_two_at_once(tmp_path: Path) -> None:
    results = result_set()
    run = write(results, tmp_path / "run")
    with ThreadPoolExecutor(8) as pool:
        targets = list(pool.map(lambda _number: publish(run, tmp_path / "reports", results), range(40)))
    (target,) = set(targets)
    assert {path.name for path in target.iterdir()} == {FILE_NAME, "support-table.md", "support-table.zh.md"}
    assert (target / FILE_NAME).read_bytes() == (run / FILE_NAME).read_bytes()
    assert [path.name for path in (tmp_path / "reports").iterdir()] == [target.name]


def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path: Path) -> None:
    results = result_set()
    run = write(results, tmp_path / "run")
    target = tmp_path / "reports" / stack_name(results)
    target.mkdir(parents=True)
    (tmp_path / "mine").write_text("mine")
    (target / FILE_NAME).symlink_to(tmp_path / "mine")
    publish(run, tmp_path / "reports", results)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (target / FILE_NAME).is_symlink()


def test_names() -> None:
    results = result_set()
    name = stack_name(results)
    for changes, end in (({"route": "worker"}, "-worker"), ({"untested": ("x",)}, "-untested")):
        assert stack_name(replace(results, header=replace(results.header, **changes))) == name + end  # type: ignore[arg-type]
