"""The stack: what is installed, from where, and in which state. Module versions first, then metadata.

`require` looks before anything is imported; `collect` reports what was really imported, from inside the rank server.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name

from conformance.errors import UsageFault
from conformance.results import Package
from conformance.stackfile import StackFile, installed_version, stack_of

BackendName = Literal["plain", "mindspeed"]

#: Distribution -> module whose `__version__` and file are reported.
REPORTED = {
    "torch": "torch",
    "torch_npu": "torch_npu",
    "verl": "verl",
    "megatron-core": "megatron.core",
    "mindspeed": "mindspeed",
    "mbridge": "mbridge",
    "transformers": "transformers",
    "tensordict": "tensordict",
    "hydra-core": "hydra",
    "omegaconf": "omegaconf",
    "numpy": "numpy",
}
#: Distributions for which MindSpeed, the plain backend or the emulated NPU stand in.
FORBIDDEN = ("triton", "apex", "transformer_engine", "flash_attn")
#: Without these no case can run. torch_npu may be emulated, mindspeed replaced by the plain backend.
NEEDED = ("torch", "verl", "megatron-core", "mbridge", "transformers", "tensordict", "hydra-core")


@dataclass(frozen=True)
class MindSpeed:
    """A MindSpeed source checkout or installation. `branch` and `commit` are None where git does not tell."""

    home: Path
    branch: str | None
    commit: str | None

    @property
    def core_series(self) -> str | None:
        """The megatron-core series that the branch name states, e.g. `0.16` for core_r0.16.0."""
        match = re.search(r"core_r(\d+\.\d+)", self.branch or "")
        return match.group(1) if match else None


def find_mindspeed(environment: dict[str, str] | os._Environ[str] = os.environ) -> MindSpeed | None:
    """MINDSPEED_HOME, else an installed `mindspeed`, else None. UsageFault for a MINDSPEED_HOME that is none."""
    home = environment.get("MINDSPEED_HOME")
    if home:
        root = Path(home).expanduser()
        if not (root / "mindspeed" / "megatron_adaptor.py").is_file():
            raise UsageFault(
                f"MINDSPEED_HOME={home}: no MindSpeed source there (mindspeed/megatron_adaptor.py is missing); "
                "right form: the directory of a git clone of Ascend/MindSpeed"
            )
        return MindSpeed(root.resolve(), *_git(root))
    spec = importlib.util.find_spec("mindspeed")
    if spec is None or not spec.origin or not (Path(spec.origin).parent / "megatron_adaptor.py").is_file():
        return None
    root = Path(spec.origin).resolve().parent.parent
    return MindSpeed(root, *_git(root))


def require() -> None:
    """UsageFault that names every missing distribution with the version that the stack's pins want."""
    stack = stack_of(installed_version("verl"))
    missing = [name for name in NEEDED if installed_version(name) is None]
    if missing:
        wanted = ", ".join(str(stack.pins.get(canonicalize_name(name), name)) for name in missing)
        raise UsageFault(f"missing: {wanted}; right form: python -m pip install -r stacks/{stack.name}.txt")


def installed(mindspeed: MindSpeed | None) -> tuple[Package, ...]:
    """What the metadata says is installed, before anything is imported: names and versions only."""
    found = [Package(name, version) for name in REPORTED if (version := installed_version(name)) is not None]
    return (*found, *([Package("mindspeed", mindspeed.branch or "unknown")] if mindspeed else []))


def untested(packages: tuple[Package, ...]) -> tuple[str, ...]:
    """What differs from the stack that pins this verl, one line each, and what must not be installed beside it."""
    beside = [name for name in FORBIDDEN if installed_version(name) is not None]
    lines = [f"{name} is installed: the suite stands in for it, and is tested without" for name in beside]
    return (*_stack(packages).untested(packages), *lines)


def deviations(packages: tuple[Package, ...]) -> tuple[str, ...]:
    """What the stack that pins this verl declares to differ from the documented one, and why."""
    return _stack(packages).declared(packages)


def _stack(packages: tuple[Package, ...]) -> StackFile:
    return stack_of(next((p.version for p in packages if p.name == "verl"), None))


def core_mismatch(mindspeed: MindSpeed) -> str | None:
    """One line when the installed megatron-core is not the series that the MindSpeed branch is made for."""
    installed = installed_version("megatron-core")
    series = mindspeed.core_series
    if series is None or installed is None or installed.startswith(series + "."):
        return None
    return (
        f"MindSpeed branch {mindspeed.branch} is made for megatron-core {series}.x, installed is megatron-core {installed}; "
        f"right form: install megatron-core {series}.x or check out another branch (--force goes on all the same)"
    )


def collect(mindspeed: MindSpeed | None) -> tuple[Package, ...]:
    """The packages that this process has imported. Paths start at the package root's parent, never at a machine's."""
    packages = [Package("python", ".".join(map(str, sys.version_info[:3])))]
    for name, module_name in REPORTED.items():
        module = sys.modules.get(module_name)
        if module is None:
            continue
        version = getattr(module, "__version__", None) or installed_version(name) or "unknown"
        commit = None
        if name == "mindspeed" and mindspeed is not None:
            version = mindspeed.branch or str(version)
            commit = mindspeed.commit
        packages.append(Package(name, str(version), _short(getattr(module, "__file__", None)), commit))
    return tuple(packages)


def _short(file: str | None) -> str | None:
    if file is None:
        return None
    from conformance.blame import HERE, short_path

    path = Path(file)
    return f"conformance/{path.relative_to(HERE).as_posix()}" if path.is_relative_to(HERE) else short_path(file)


def _git(root: Path) -> tuple[str | None, str | None]:
    """(branch, short commit) of a checkout; None where git names none."""

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() or None

    top = ask("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return None, None  # no checkout of its own: it lies inside somebody else's, such as a venv in a project
    branch = ask("rev-parse", "--abbrev-ref", "HEAD")
    if branch == "HEAD":  # detached, as CI checks out: a branch at the same commit names it
        listed = ask("for-each-ref", "--points-at", "HEAD", "--format=%(refname:short)", "refs/heads", "refs/remotes") or ""
        names = sorted({name.removeprefix("origin/") for name in listed.split()} - {"origin", "HEAD"})
        branch = next((name for name in names if "core_r" in name), names[0] if names else None)
    return branch, ask("rev-parse", "--short=12", "HEAD")
