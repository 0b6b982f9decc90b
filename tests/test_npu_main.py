"""Which NPU a run gets (`activate`), and `python -m conformance.npu`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from conformance import npu
from conformance.errors import UsageFault
from conformance.npu.__main__ import parse

pytestmark = pytest.mark.stack

ROOT = Path(__file__).resolve().parents[1]
SHOW = "import sys, torch_npu; print(sys.argv, sys.path[0], torch_npu.__version__, __name__)\n"


def run(*arguments: str, cwd: Path, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` with the project and `path` importable."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VERL_PLATFORM", "MINDSPEED_HOME")}
    environment = kept | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path))), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def command(*arguments: str, cwd: Path, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    return run("-m", "conformance.npu", *arguments, cwd=cwd, path=path)


def fake_real(folder: Path, body: str) -> Path:
    """A directory with a torch_npu that is not ours: package and distribution, with the entry point that torch loads."""
    package = folder / "torch_npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(body)
    metadata = folder / "torch_npu-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 9.9\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return folder


WORKS = "__version__ = '9.9'\ndef _autoload(): ...\n"
BROKEN = "raise ImportError('libhccl.so: cannot open shared object file')\n"


def test_script_gets_its_arguments_and_directory(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "show.py").write_text("import beside\n" + SHOW)
    (tmp_path / "sub" / "beside.py").write_text("")
    done = command("--npu", "emulated", "sub/show.py", "--npu", "x", "-m", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(" /")[0] == "['sub/show.py', '--npu', 'x', '-m']"
    assert done.stdout.endswith(f"{tmp_path}/sub 2.10.0 __main__\n")
    assert "device: emulated (torch_npu 2.10.0)" in done.stderr


def test_module_gets_its_arguments_and_children_the_emulation(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text(
        SHOW + "import subprocess\nsubprocess.run([sys.executable, '-c', 'import torch_npu; print(torch_npu.__version__)'])\n"
    )
    done = command("--npu=emulated", "-m", "pack", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = sorted(done.stdout.splitlines())
    assert first == "2.10.0"
    assert second == f"['{tmp_path}/pack/__main__.py', '1'] {tmp_path} 2.10.0 __main__"


def test_exit_code_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "leave.py").write_text("raise SystemExit(7)\n")
    assert command("leave.py", cwd=tmp_path).returncode == 7


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nowhere.py",), "nowhere.py: no such script"),
        (("-m", "nowhere.at.all"), "no module named 'nowhere'"),
        (("-m", "nowhere"), "nowhere: no such module"),
        (("-m", "empty"), "without __main__"),
        (("--npu", "cuda", "x.py"), "--npu cuda: no such mode"),
        (("--npu",), "no such mode"),
        (("--frob", "x.py"), "unknown option --frob"),
        (("-m",), "no program to run"),
        ((), "no program to run"),
        (("--npu", "real", "there.py"), "no torch_npu on the import path"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "__init__.py").write_text("")
    (tmp_path / "there.py").write_text("")
    done = command(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert named in done.stderr
    assert "right form:" in done.stderr


def test_arguments_parse() -> None:
    assert parse(["a.py"]) == ("auto", False, "a.py", [])
    assert parse(["--npu", "real", "-m", "a.b", "--npu", "auto"]) == ("real", True, "a.b", ["--npu", "auto"])
    assert parse(["--npu=emulated", "a.py", "-m"]) == ("emulated", False, "a.py", ["-m"])


@pytest.mark.parametrize(
    ("mode", "body", "expected"),
    [
        ("auto", WORKS, "npu 9.9"),
        ("real", WORKS, "npu 9.9"),
        ("emulated", WORKS, "emulated 2.10.0"),
        ("auto", BROKEN, "emulated 2.10.0"),
    ],
)
def test_a_real_torch_npu_is_left_alone(tmp_path: Path, mode: str, body: str, expected: str) -> None:
    real = fake_real(tmp_path / "real", body)
    code = (
        "import os, sys; from conformance import npu; "
        f"d = npu.activate({mode!r}, mindspeed=False); "
        "print(d.name, d.version, os.environ['VERL_PLATFORM'], any('conformance/npu' in p for p in sys.path))"
    )
    done = run("-c", code, cwd=tmp_path, path=(real,))
    assert done.stdout == f"{expected} huawei {expected != 'npu 9.9'}\n", done.stderr


def test_an_auto_that_looks_nowhere_would_be_seen(tmp_path: Path) -> None:
    """The planted fault of the test above: an `auto` that does not look for a real torch_npu gives the emulation."""
    real = fake_real(tmp_path / "real", WORKS)
    code = "from conformance import npu; npu._has_real = lambda: False; print(npu.activate('auto', mindspeed=False).name)"
    assert run("-c", code, cwd=tmp_path, path=(real,)).stdout == "emulated\n"


def test_a_real_torch_npu_that_does_not_import_says_why(tmp_path: Path) -> None:
    real = fake_real(tmp_path / "real", BROKEN)
    (tmp_path / "x.py").write_text("")
    done = command("--npu", "real", "x.py", cwd=tmp_path, path=(real,))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "libhccl.so" in done.stderr
    assert "CANN" in done.stderr


@pytest.mark.parametrize("mode", ["auto", "emulated"])
def test_rows_run_beside_a_torch_npu_that_does_not_import(tmp_path: Path, mode: str) -> None:
    """torch would import it by itself, in the process that reads the ranks' tensors as well."""
    real = fake_real(tmp_path / "real", BROKEN)
    alone = run("-c", "import torch", cwd=tmp_path, path=(real,))
    assert "Failed to load the backend extension: torch_npu" in alone.stderr  # the stand-in breaks torch, as the vendor's would
    selection = ["-p", "no:cacheprovider", "--row", "pp", "-k", "ref and float32", "--reports", str(tmp_path / "reports")]
    options = ["--backend", "plain", "--npu", mode]
    done = run("-m", "pytest", str(ROOT / "conformance"), *selection, *options, cwd=ROOT, path=(real,))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_emulated_refuses_a_process_with_another_torch_npu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    other = ModuleType("torch_npu")
    other.__file__ = str(tmp_path / "torch_npu" / "__init__.py")
    other.__dict__["__version__"] = "9.9"
    monkeypatch.setitem(sys.modules, "torch_npu", other)
    before = list(sys.path)
    with pytest.raises(UsageFault, match="imported already"):
        npu.activate("emulated", mindspeed=False)
    assert npu.activate("auto", mindspeed=True) == npu.Device("npu", "9.9", other.__file__)
    assert sys.path == before


@pytest.mark.parametrize("mindspeed", [False, True])
def test_triton_and_torchair_stand_in_for_mindspeed_only(tmp_path: Path, mindspeed: bool) -> None:
    code = (
        "import importlib.util as u; from conformance import npu; "
        f"npu.activate('emulated', mindspeed={mindspeed}); print([u.find_spec(n) is not None for n in ('triton', 'torchair')])"
    )
    done = run("-c", code, cwd=tmp_path)
    assert done.stdout == f"{[mindspeed, mindspeed]}\n", done.stderr


def test_stand_ins_decorate_but_do_not_run(tmp_path: Path) -> None:
    code = """
from conformance import npu
npu.activate('emulated', mindspeed=True)
import torchair, triton, triton.language as tl, triton.language.extra.libdevice, triton.runtime.driver as driver
@triton.autotune(configs=[triton.Config({'B': 1})], key=['no_such'])
@triton.jit
def kernel(x, B: tl.constexpr): ...
assert isinstance(kernel, triton.runtime.autotuner.Autotuner) and isinstance(kernel.fn, triton.JITFunction)
assert bool(tl.constexpr(1)) and not tl.constexpr(0) and driver.active.get_current_target().backend == 'npu'
assert triton.next_power_of_2(5) == 8 and triton.cdiv(5, 2) == 3
assert torchair.register_fx_node_ge_converter(None)(len) is len and torchair.ge.TensorSpec
for call in (lambda: kernel[(1,)](1), lambda: tl.no_such, lambda: torchair.no_such):
    try: call()
    except (RuntimeError, AttributeError) as fault: print(type(fault).__name__, 'emulated NPU' in str(fault))
"""
    done = run("-c", code, cwd=tmp_path)
    assert done.stdout.splitlines() == ["RuntimeError True", "AttributeError True", "AttributeError True"], done.stderr


@pytest.mark.mindspeed
def test_mindspeed_imports(tmp_path: Path) -> None:
    home = os.environ.get("MINDSPEED_HOME")
    if not home:
        pytest.skip("MINDSPEED_HOME is not set")
    code = (
        "from conformance import npu; npu.activate('emulated', mindspeed=True); "
        "import mindspeed.megatron_adaptor, torch; npu.install_kernels(); print('imported', torch.cuda.is_available())"
    )
    done = run("-c", code, cwd=tmp_path, path=(Path(home),))
    assert "imported True" in done.stdout, done.stderr[-2000:]
