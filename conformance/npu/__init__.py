"""The NPU that a run uses: the real one, or an emulated one on the CPU.

The emulation is an ordinary package directory, `site/`, whose `torch_npu` anybody can import once it is on the import path;
`site_mindspeed/` has stand-ins for the packages that MindSpeed imports unconditionally. With a real torch_npu neither is.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from conformance.errors import UsageFault

__all__ = ["Device", "Mode", "activate", "install_kernels", "keep_torch_alone", "may_be_real"]

Mode = Literal["auto", "emulated", "real"]

SITE = Path(__file__).resolve().parent / "site"
SITE_MINDSPEED = Path(__file__).resolve().parent / "site_mindspeed"

#: Set before anything is imported: verl chooses its platform by it.
_PLATFORM = ("VERL_PLATFORM", "huawei")
#: Keeps `import torch` from loading an installed torch_npu by itself, which fails where there is no CANN.
_NO_AUTOLOAD = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


@dataclass(frozen=True)
class Device:
    """What `import torch_npu` gives: `name` is `npu` or `emulated`, `version` torch_npu's, `path` the package's file."""

    name: Literal["npu", "emulated"]
    version: str
    path: str


def activate(mode: Mode, *, mindspeed: bool) -> Device:
    """Import torch_npu for this process and say which. Call it before anything imports verl, Megatron or MindSpeed.

    `auto` takes a real torch_npu that imports, else the emulation; `real` takes what the import path gives; `emulated` takes
    the emulation. `mindspeed`: MindSpeed will be imported, so stand in for triton and torchair too (without MindSpeed a
    triton that is none breaks torch.compile). UsageFault when the mode cannot be had.
    """
    os.environ.setdefault(*_PLATFORM)
    keep_torch_alone()
    loaded = sys.modules.get("torch_npu")
    if loaded is not None and _is_emulated(loaded) and mode == "real":
        raise UsageFault("npu=real: the emulated torch_npu is imported already; right form: start a new process")
    if loaded is not None and not _is_emulated(loaded):
        if mode == "emulated":
            raise UsageFault(
                f"npu=emulated: a real torch_npu is imported already ({loaded.__file__}); "
                "right form: start a new process, or npu=real"
            )
        return _device(loaded)
    if mode == "real":
        return _device(_import_real())
    if mode == "auto" and loaded is None and _has_real():
        try:
            return _device(_import_real())
        except UsageFault:
            _forget_torch_npu()
    _prepend(SITE)
    if mindspeed:
        _prepend(SITE_MINDSPEED)
    return _device(importlib.import_module("torch_npu"))


def keep_torch_alone() -> None:
    """From now on `import torch` in this process, and in those that it starts, imports no torch_npu: `activate` does.

    The process that reads results needs it, too: it imports torch, and no device, whatever is installed beside it.
    """
    os.environ.setdefault(*_NO_AUTOLOAD)


def may_be_real(mode: Mode) -> bool:
    """Whether `activate` in this mode would try a real torch_npu."""
    return mode == "real" or (mode == "auto" and _has_real())


def install_kernels() -> None:
    """Give MindSpeed emulated kernels instead of those it would compile with CANN; after MindSpeed's import."""
    kernels = importlib.import_module("conformance.npu.kernels")  # it imports MindSpeed, which a plain run has not
    kernels.install_kernels()


def _prepend(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
        importlib.invalidate_caches()


def _has_real() -> bool:
    """Is there a torch_npu on the import path apart from the emulation?"""
    outside = [entry for entry in sys.path if Path(entry or ".").resolve() != SITE]
    return importlib.machinery.PathFinder.find_spec("torch_npu", outside) is not None


def _import_real() -> ModuleType:
    if not _has_real():
        raise UsageFault(
            "npu=real: no torch_npu on the import path; right form: install CANN, source its set_env.sh, "
            "python -m pip install torch_npu of torch's version, or npu=emulated"
        )
    try:
        return importlib.import_module("torch_npu")
    except Exception as fault:  # a broken installation raises anything, ImportError for CANN's libraries above all
        _forget_torch_npu()
        cause = str(fault).partition("\n")[0]
        raise UsageFault(
            f"npu=real: import torch_npu failed ({type(fault).__name__}: {cause}); right form: install CANN, source its "
            "set_env.sh, python -m pip install torch_npu of torch's version, or npu=emulated"
        ) from None


def _forget_torch_npu() -> None:
    for name in [n for n in sys.modules if n == "torch_npu" or n.startswith("torch_npu.")]:
        del sys.modules[name]


def _is_emulated(module: ModuleType) -> bool:
    return Path(module.__file__ or "").resolve().is_relative_to(SITE)


def _device(module: ModuleType) -> Device:
    return Device("emulated" if _is_emulated(module) else "npu", str(module.__version__), str(module.__file__))
