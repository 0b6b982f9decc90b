"""The stack: what is installed, from where, and in which state. Module versions first, then metadata.

`require` looks before anything is imported; `collect` reports what was really imported, from inside the rank server.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.utils import canonicalize_name

from conformance.errors import UsageFault
from conformance.results import Package
from conformance.stackfile import StackFile, installed_version, satisfies, stack_of

if TYPE_CHECKING:
    from conformance.ranks import Raised

HERE = Path(__file__).resolve().parent
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
        try:
            root = Path(home).expanduser().resolve()
            found = (root / "mindspeed" / "megatron_adaptor.py").is_file()
        except (OSError, RuntimeError, ValueError):  # no such user, too long, a loop of links, a NUL
            found = False
        if not found:
            raise UsageFault(
                f"MINDSPEED_HOME={home[:200]}: no MindSpeed source there (mindspeed/megatron_adaptor.py is missing); "
                "right form: the directory of a git clone of Ascend/MindSpeed"
            )
        return MindSpeed(root, *_git(root))
    spec = importlib.util.find_spec("mindspeed")
    if spec is None or not spec.origin or not (Path(spec.origin).parent / "megatron_adaptor.py").is_file():
        return None
    root = Path(spec.origin).resolve().parent.parent
    return MindSpeed(root, *_git(root))


#: Behind the commit of a checkout in which tracked files are not as committed.
CHANGED = "+changes"


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
    return (*found, *([Package("mindspeed", mindspeed.branch or "unknown", None, mindspeed.commit)] if mindspeed else []))


def untested(packages: tuple[Package, ...]) -> tuple[str, ...]:
    """What differs from the stack that pins this verl, one line each, and what must not be installed beside it."""
    beside = [name for name in FORBIDDEN if installed_version(name) is not None]
    lines = [f"{name} is installed: the suite stands in for it, and is tested without" for name in beside]
    lines += [f"{p.name}'s checkout has changes of its own" for p in packages if (p.commit or "").endswith(CHANGED)]
    return (*_stack(packages).untested(packages), *lines)


def deviations(packages: tuple[Package, ...]) -> tuple[str, ...]:
    """What the stack that pins this verl declares to differ from the documented one, and why."""
    return _stack(packages).declared(packages)


def _stack(packages: tuple[Package, ...]) -> StackFile:
    return stack_of(next((p.version for p in packages if p.name == "verl"), None))


def core_mismatch(mindspeed: MindSpeed) -> str | None:
    """One line when the installed megatron-core is not the series that the MindSpeed branch is made for."""
    installed = _core_on_path() or installed_version("megatron-core")
    series = mindspeed.core_series
    if series is None or installed is None or installed.startswith(series + "."):
        return None
    return (
        f"MindSpeed branch {mindspeed.branch} is made for megatron-core {series}.x, installed is megatron-core {installed}; "
        f"right form: install megatron-core {series}.x or check out another branch (--force goes on all the same)"
    )


def _core_on_path() -> str | None:
    """The version of the megatron-core that an import would give: a source tree on the path goes before what is installed."""
    spec = importlib.util.find_spec("megatron.core") if importlib.util.find_spec("megatron") else None
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("package_info.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) *= *(\d+)", text, re.MULTILINE))
    return ".".join(numbers[name] for name in ("MAJOR", "MINOR", "PATCH")) if len(numbers) == 3 else None


#: What a caller is told that imports what a package, be it sound, does not have.
_LACKS = re.compile(r"No module named '(\w+)|cannot import name .* from '(\w+)")


def broken_line(raised: Raised) -> str:
    """What made the import of the stack fail: the package that is broken, the version that is wanted, and the error."""
    text = f"{raised.type}: {raised.message}".strip().splitlines()[0]
    name = _broken(raised)
    if name is None:
        return text
    have, pin = installed_version(name), stack_of(installed_version("verl")).pins.get(canonicalize_name(name))
    wanted = f" (wanted: {pin})" if pin else ""
    if have is None:
        right = f"; right form: python -m pip install '{pin}'" if pin else ""
        return f"{name}{wanted} is not installed: {text}{right}"
    if _LACKS.search(raised.message) and (pin is None or satisfies(have, pin)):
        # As pinned, and whole as far as one can see: another version, or a source tree, is what its caller wants.
        return f"{name} {have}{wanted} lacks what is imported from it: {text}"
    right = f"; right form: python -m pip install --force-reinstall --no-deps '{pin}'" if pin else ""
    return f"{name} {have}{wanted} is broken: {text}{right}"


def _broken(raised: Raised) -> str | None:
    """The distribution whose module raised; of what is no Python, or is not there, the one that it was imported from."""
    frames = [f for f in raised.frames if not Path(f.file).is_relative_to(HERE) and "<frozen" not in f.file]
    said = _LACKS.search(raised.message)
    if said is None and raised.frames and raised.type.rpartition(".")[2] in ("SyntaxError", "IndentationError"):
        said = re.match(r"(?:from|import)\s+(\w+)", raised.frames[-1].source)
    if said is not None:
        return _distribution(next(filter(None, said.groups())))
    for frame in reversed(frames):
        parts = Path(frame.file).parts
        for name, module in REPORTED.items():
            wanted = tuple(module.split("."))
            if any(parts[i : i + len(wanted)] == wanted for i in range(len(parts))):
                return name
        if "site-packages" in parts:
            return _distribution(parts[parts.index("site-packages") + 1].removesuffix(".py"))
    return None


def _distribution(module: str) -> str:
    """The distribution that brings a top-level module; the module's own name where none says so."""
    return next((d for d, m in REPORTED.items() if m == module), None) or next(
        iter(importlib.metadata.packages_distributions().get(module, [])), module
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
    commit = ask("rev-parse", "--short=12", "HEAD")
    changed = commit is not None and ask("status", "--porcelain", "--untracked-files=no") is not None
    return branch, f"{commit}{CHANGED}" if changed else commit
