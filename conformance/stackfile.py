"""The stacks that this suite is tested with: `stacks/<name>.txt`, a requirements file with two kinds of comments that are read.

    # mindspeed: <address of a git repository> <branch>
    # deviation[torch>=2.12]: <what differs from the documented stack, and why; for the versions that the brackets name>

A stack is known by its verl pin. A deviation holds for its stack alone, and is shown in the header of every run and report.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from conformance.errors import UsageFault
from conformance.results import Package

#: The repository's `stacks/`, by a link, so that an installed package has them too.
STACKS = Path(__file__).resolve().parent / "stacks"
#: What is wanted where no installed verl says otherwise.
DEFAULT_STACK = "verl091-mcore016"
#: Holds what the suite itself needs: no stack.
_SUITE = "suite"


@dataclass(frozen=True)
class Deviation:
    """A deviation, and the versions that it is of; None: of all."""

    of: Requirement | None
    text: str


@dataclass(frozen=True)
class StackFile:
    """One file as read. `pins`: canonical name -> requirement. `mindspeed`: address and branch."""

    name: str
    pins: dict[str, Requirement]
    mindspeed: tuple[str, str] | None
    deviations: tuple[Deviation, ...]

    @cached_property
    def branch(self) -> str | None:
        """The MindSpeed branch that the stack is for."""
        return self.mindspeed[1] if self.mindspeed else None

    def declared(self, packages: Iterable[Package]) -> tuple[str, ...]:
        """What deviates from the documented stack in these versions, and why."""
        have = {canonicalize_name(p.name): p.version for p in packages}
        return tuple(d.text for d in self.deviations if d.of is None or satisfies(have.get(canonicalize_name(d.of.name)), d.of))

    def untested(self, packages: Iterable[Package]) -> tuple[str, ...]:
        """What differs from the stack, one line each; such a combination is run, and said to be untested."""
        found = []
        for package in packages:
            name = canonicalize_name(package.name)
            pin = self.pins.get(name)
            if pin is not None and not satisfies(package.version, pin):
                found.append(f"{package.name} {package.version} (the stack pins {pin.specifier})")
            if name == "mindspeed" and self.branch is not None and package.version != self.branch:
                found.append(f"MindSpeed branch {package.version} (the stack is tested with {self.branch})")
        return tuple(found)


def satisfies(version: str | None, pin: Requirement) -> bool:
    """Whether the release fits the pin, whatever its local build label (`+cpu`); text that is no version does not."""
    try:
        return version is not None and pin.specifier.contains(Version(version).public, prereleases=True)
    except InvalidVersion:
        return False


def names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in STACKS.glob("*.txt") if path.stem != _SUITE))


def stack_of(verl: str | None) -> StackFile:
    """The stack that pins this version of verl; the default one where none does."""
    if verl is not None:
        for name in names():
            stack = read_stack(name)
            if "verl" in stack.pins and satisfies(verl, stack.pins["verl"]):
                return stack
    return read_stack(DEFAULT_STACK)


def installed_version(name: str) -> str | None:
    """A distribution's version by its metadata; nothing is imported."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_stack(stack: StackFile) -> None:
    """UsageFault when what is installed is another stack: verl and megatron-core decide."""
    for name in ("verl", "megatron-core"):
        version, pin = installed_version(name), stack.pins.get(name)
        if pin is not None and not satisfies(version, pin):
            have = f"{name} {version}" if version else f"no {name}"
            raise UsageFault(f"--stack {stack.name}: {have} is installed; right form: pip install -r stacks/{stack.name}.txt")


def read_stack(name: str) -> StackFile:
    """Read and check a stack's file; UsageFault with the line for what is no requirement."""
    path = STACKS / f"{name}.txt"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UsageFault(f"stacks/{path.name}: not UTF-8 text; right form: a line name==version each") from None
    except OSError as fault:
        raise UsageFault(f"stacks/{path.name}: cannot be read ({fault.strerror}); there are: {', '.join(names())}") from None
    pins: dict[str, Requirement] = {}
    mindspeed: tuple[str, str] | None = None
    deviations = []
    for number, line in enumerate(lines, 1):
        where = f"stacks/{path.name}:{number}"
        said = re.fullmatch(r"#\s*(mindspeed|deviation)(?:\[(.*?)\])?:\s*(.*)", line.strip())
        if said and said[1] == "mindspeed":
            parts = said[3].split()
            if len(parts) != 2:
                raise UsageFault(f"{where}: {said[3]!r} is no source; right form: mindspeed: ADDRESS BRANCH")
            mindspeed = (parts[0], parts[1])
        elif said:
            deviations.append(Deviation(_requirement(said[2], where) if said[2] else None, said[3]))
        text = line.partition("#")[0].strip()
        if not text or text.startswith("-"):
            continue
        requirement = _requirement(text, where)
        pins[canonicalize_name(requirement.name)] = requirement
    return StackFile(name, pins, mindspeed, tuple(deviations))


def _requirement(text: str, where: str) -> Requirement:
    try:
        return Requirement(text)
    except InvalidRequirement:
        raise UsageFault(f"{where}: {text!r} is no requirement; right form: name==version") from None
