"""`--npu real` takes the very same path: tested with a copy of the emulation that stands where a vendor's package would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.npu import SITE

pytestmark = pytest.mark.stack
ROOT = Path(__file__).resolve().parents[1]


def run(tmp_path: Path, path: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["--row", "pp", "--backend", "plain", "--npu", "real", "--reports", str(tmp_path / "reports")]
    env = {**os.environ, "PYTHONPATH": str(path), "MINDSPEED_HOME": ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "conformance", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180)


def test_an_installed_torch_npu_is_used_and_the_emulation_stays_out(tmp_path: Path) -> None:
    shutil.copytree(SITE, tmp_path / "packages", ignore=shutil.ignore_patterns("__pycache__"))
    done = run(tmp_path, tmp_path / "packages")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = next((tmp_path / "reports" / "runs").rglob("results.jsonl")).read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["device"] == "npu"
    assert {json.loads(line)["outcome"] for line in lines[1:-1]} == {"pass"}


def test_the_emulation_is_no_real_npu(tmp_path: Path) -> None:
    done = run(tmp_path, SITE)
    assert done.returncode == 2
    assert "npu=real: no torch_npu on the import path" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
