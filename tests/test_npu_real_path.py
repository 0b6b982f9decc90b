"""`--npu real` takes the very same path: tested with a copy of the emulation that stands where a vendor's package would.

The copy is as unlike the emulation as the vendor's package is: its operators are in a module of another name, so that nothing
outside it can reach them; it refuses its devices in a fork of the process that imported it; and no two ranks can have one device.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance import step
from conformance.errors import ConformanceError
from conformance.npu import SITE, SITE_MINDSPEED
from conformance.ranks import RankContext

pytestmark = pytest.mark.stack
ROOT = Path(__file__).resolve().parents[1]
IGNORED = shutil.ignore_patterns("__pycache__")

#: As the vendor's torch_npu has it, but stricter: the vendor's refuses when the device was used before the fork.
REFUSE_FORKS = """

_imported_in, _set_device = os.getpid(), set_device


def set_device(device):
    if os.getpid() != _imported_in:
        raise RuntimeError("Cannot re-initialize NPU in forked subprocess.")
    _set_device(device)
"""


#: As HCCL, which has one rank a device.
ONE_RANK_A_DEVICE = """

_create = create


def create(backend_options, group_options):
    import os
    from .. import npu

    if npu.current_device() != int(os.environ["LOCAL_RANK"]):
        raise RuntimeError("HCCL: two ranks on one device")
    return _create(backend_options, group_options)
"""


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(old) >= 1, f"{file.name} has no {old!r}"
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a torch_npu that is not ours, and with what an NPU user has besides: triton, torchair, acl."""
    packages = tmp_path_factory.mktemp("vendor") / "packages"
    shutil.copytree(SITE, packages, ignore=IGNORED)
    package = packages / "torch_npu"
    (package / "ops").rename(package / "_kernels")
    replace(package / "__init__.py", " ops,", " _kernels,")
    replace(package / "__init__.py", "ops.EXPORTS", "_kernels.EXPORTS")
    for module, more in (("npu/__init__.py", REFUSE_FORKS), ("_C/_distributed_c10d.py", ONE_RANK_A_DEVICE)):
        with (package / module).open("a", encoding="utf-8") as file:
            file.write(more)
    return packages


def run(reports: Path, path: list[Path], arguments: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    options = ["-p", "no:cacheprovider", "--npu", "real", "--reports", str(reports)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **env}
    command = [sys.executable, "-m", "pytest", "conformance", *options, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def records(reports: Path, done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The checks' records; the header, which comes first, must say `npu`."""
    found = list((reports / "runs").rglob("results.jsonl"))
    assert found, done.stdout + done.stderr
    header, *rest = [json.loads(line) for line in found[0].read_text(encoding="utf-8").splitlines()]
    assert header["device"] == "npu"
    return [line for line in rest if line["kind"] == "check"]


def test_plain_rows_pass_on_an_installed_torch_npu(tmp_path: Path, vendor: Path) -> None:
    """Two ranks that talk by hccl, and recomputation, whose evidence is counted in the backward pass."""
    checks = "actor and ((pp and float32) or (recompute and engaged and not block))"  # few, since a spawned rank takes long
    chosen = ["--row", "pp", "--row", "recompute", "-k", checks]
    done = run(tmp_path, [vendor], ["--backend", "plain", *chosen], MINDSPEED_HOME="")
    found = {(record["row"], record["check"], record["outcome"]) for record in records(tmp_path, done)}
    assert found == {("pp", "parity", "pass"), ("recompute", "engaged", "pass")}, done.stdout + done.stderr


@pytest.mark.mindspeed
def test_a_fused_row_passes_with_mindspeed(tmp_path: Path, vendor: Path) -> None:
    """The operator is counted by the dispatch trace alone.

    The rows of fused operators of dense models need no kernel that MindSpeed compiles: here it could not, without CANN.
    """
    shutil.copytree(SITE_MINDSPEED, tmp_path / "beside", ignore=IGNORED)
    chosen = ["--row", "flash-attn", "-k", "actor and engaged"]
    done = run(tmp_path, [vendor, tmp_path / "beside"], ["--backend", "mindspeed", *chosen])
    found = [(record["row"], record["outcome"]) for record in records(tmp_path, done)]
    assert found == [("flash-attn", "always_on")], done.stdout + done.stderr


@pytest.mark.parametrize(("count", "chosen"), [(2, [1]), (1, [])])
def test_a_rank_takes_the_device_of_its_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, chosen: list[int]
) -> None:
    taken: list[int] = []
    devices = SimpleNamespace(device_count=lambda: count, set_device=taken.append)
    monkeypatch.setitem(sys.modules, "verl.utils.device", SimpleNamespace(get_torch_device=lambda: devices))
    context = RankContext(1, 2, "", tmp_path)
    if chosen:
        step._take_device(context)
    else:
        with pytest.raises(ConformanceError, match="the case needs 2 NPUs, and 1 can be seen here"):
            step._take_device(context)
    assert taken == chosen


def test_the_emulation_is_no_real_npu(tmp_path: Path) -> None:
    done = run(tmp_path, [SITE], ["--row", "pp", "--backend", "plain"])
    assert done.returncode == 2
    assert "npu=real: no torch_npu on the import path" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
