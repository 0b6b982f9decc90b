"""What is installed, from where, and whether verl's documents name that combination. Nothing of the stack is imported.

`combinations.yaml` has the documented combinations. A local build label (`+cpu`) makes no difference; torch_npu that is not
installed makes none either, since the emulated one stands in for it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field

from conformance.known import check_specifier
from conformance.matrix import Words
from conformance.results import Package
from conformance.stack import NEEDED, REPORTED, MindSpeed, core_mismatch, untested
from conformance.yamlsource import Items, Strictly, load, validate

COMBINATIONS = Path(__file__).resolve().parent / "combinations.yaml"
Specifier = Annotated[str, AfterValidator(check_specifier)]


class Core(Strictly):
    """megatron-core: the branch or tag that the document names, and the versions that it stands for."""

    name: Words
    versions: Specifier


class Combination(Strictly):
    """One documented combination. `mindspeed` is a branch, or a commit's first eight digits."""

    verl: Words
    mindspeed: Words
    megatron_core: Core
    source: Words
    torch: Items[Words] = ()
    torch_npu: Items[Words] = ()
    python: Specifier | None = None
    packages: Mapping[str, Specifier] = {}
    cann: Words | None = None
    rollout: Words | None = None
    note: Words | None = None

    @property
    def title(self) -> str:
        """E.g. `verl 0.9.0 with MindSpeed core_r0.16.0`."""
        return f"verl {self.verl} with MindSpeed {self.mindspeed}"


class Combinations(Strictly):
    """The whole file, newest first."""

    combinations: Items[Combination] = Field(min_length=1)


@dataclass(frozen=True)
class Found:
    """One package: its version (None: not installed) and the directory or file that an import would take."""

    name: str
    version: str | None
    path: str | None


@dataclass(frozen=True)
class Comparison:
    """One thing that a document names: whether the installed stack has it, what it has, and how to change that."""

    fits: bool
    what: str
    right: str


def load_combinations(path: Path = COMBINATIONS) -> tuple[Combination, ...]:
    """Read and check the documented combinations; UsageFault with file and line."""
    return validate(load(path), Combinations).combinations


def installed(mindspeed: MindSpeed | None) -> tuple[Found, ...]:
    """The stack's packages, in the order of `stack.REPORTED`, after Python. MindSpeed's version is its branch."""
    found = [Found("python", platform.python_version(), None)]
    for name, module in REPORTED.items():
        if name == "mindspeed" and mindspeed is not None:
            version = " ".join(filter(None, (mindspeed.branch or "unknown branch", mindspeed.commit)))
            found.append(Found(name, version, str(mindspeed.home)))
            continue
        path = _origin(module)
        found.append(Found(name, _version(name) or ("unknown" if path else None), path))
    return tuple(found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _origin(module: str) -> str | None:
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:  # the package around it is missing
        return None
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else None


def compare(combination: Combination, found: Sequence[Found], mindspeed: MindSpeed | None) -> list[Comparison]:
    """The installed stack against one documented combination, thing by thing."""
    have = {f.name: f.version for f in found}
    return [*_main_parts(combination, have, mindspeed), *_packages(combination, have)]


def _main_parts(wanted: Combination, have: Mapping[str, str | None], mindspeed: MindSpeed | None) -> Iterator[Comparison]:
    release = _is_version(wanted.verl)
    right = f"python -m pip install verl=={wanted.verl}" if release else f"a checkout of verl's branch {wanted.verl}"
    yield _compared(release and _within(have["verl"], f"=={wanted.verl}"), "verl", have, wanted.verl, right)
    named = mindspeed is not None and _is_mindspeed(wanted.mindspeed, mindspeed)
    right = f"git checkout {wanted.mindspeed} in a clone of Ascend/MindSpeed, and MINDSPEED_HOME=<the clone>"
    yield _compared(named, "mindspeed", have, wanted.mindspeed, right)
    core = wanted.megatron_core
    right = f"python -m pip install 'megatron-core{core.versions}'"
    yield _compared(_within(have["megatron-core"], core.versions), "megatron-core", have, core.name, right)
    if wanted.python:
        yield _compared(_within(have["python"], wanted.python), "python", have, wanted.python, f"a Python {wanted.python}")


def _packages(wanted: Combination, have: Mapping[str, str | None]) -> Iterator[Comparison]:
    for name, versions in (("torch", wanted.torch), ("torch_npu", wanted.torch_npu)):
        if versions and (name, have[name]) != ("torch_npu", None):
            fits = any(_within(have[name], f"=={version}") for version in versions)
            yield _compared(fits, name, have, " or ".join(versions), f"python -m pip install {name}=={versions[0]}")
    for name, specifier in wanted.packages.items():
        right = f"python -m pip install '{name}{specifier}'"
        yield _compared(_within(have.get(name), specifier), name, have, specifier, right)


def _compared(fits: bool, name: str, have: Mapping[str, str | None], wanted: str, right: str) -> Comparison:
    return Comparison(fits, f"{name}: {have.get(name) or 'not installed'}, documented {wanted}", right)


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _within(version: str | None, wanted: str) -> bool:
    """Whether the release fits, whatever its local build label; text that is no version does not."""
    if version is None or not _is_version(version):
        return False
    return SpecifierSet(wanted).contains(version, prereleases=True)


def _is_mindspeed(wanted: str, mindspeed: MindSpeed) -> bool:
    return wanted == mindspeed.branch or bool(mindspeed.commit and mindspeed.commit.startswith(wanted))


def lines(found: Sequence[Found], combinations: Sequence[Combination], mindspeed: MindSpeed | None) -> list[str]:
    """What `conformance stack` says: what is installed and from where, then what the documents say of it."""
    said = [f"{f.name:14} {f.version or 'not installed':24} {f.path or ''}".rstrip() for f in found]
    said.append("")
    compared = [(compare(combination, found, mindspeed), combination) for combination in combinations]
    # The smallest part that differs, so that a document which says little is not near to everything; of equals the newest.
    nearby, nearest = min(compared, key=lambda pair: sum(not c.fits for c in pair[0]) / len(pair[0]))
    where = f"{nearest.title} ({nearest.source})"
    if all(c.fits for c in nearby):
        said.append(f"documented: {where}")
    else:
        said.append(f"not a documented combination; the nearest is {where}:")
        said += [line for c in nearby if not c.fits for line in (f"  {c.what}", f"      to change it: {c.right}")]
    said += [f"  it also names {what} {text}, not looked at here" for what, text in _untold(nearest)]
    if nearest.note:
        said.append(f"  note: {nearest.note}")
    if any(f.name == "torch_npu" and f.version is None for f in found):
        wanted = f"; documented {' or '.join(nearest.torch_npu)}" if nearest.torch_npu else ""
        said.append(f"  torch_npu is not installed: runs are on the emulated NPU{wanted}")
    return [*said, "", *_tested(found, mindspeed)]


def _untold(combination: Combination) -> Iterator[tuple[str, str]]:
    for what, text in (("CANN", combination.cann), ("rollout", combination.rollout)):
        if text:
            yield what, text


def _tested(found: Sequence[Found], mindspeed: MindSpeed | None) -> Iterator[str]:
    """Whether it is the stack that this suite was tested with, and what else is known to be wrong with it."""
    branch = mindspeed.branch or "unknown" if mindspeed else ""
    versions = [(f.name, branch if f.name == "mindspeed" and mindspeed else f.version) for f in found]
    packages = tuple(Package(name, version) for name, version in versions if version is not None)
    off = [*untested(packages), *(f"{f.name} is missing" for f in found if f.version is None and f.name in NEEDED)]
    yield "these are the versions that this suite is tested with" if not off else f"this suite is not tested so: {', '.join(off)}"
    mismatch = core_mismatch(mindspeed) if mindspeed else None
    if mismatch:
        yield mismatch
