"""What the vendor declares: operator schemas in torch_npu's wheels, and the facts of them that are kept in `vendor_schemas.json`.

A wheel of torch_npu does not import without CANN, but it can be read: its library holds the schema of every operator as a
string. Wheels come from PyPI, by pip, into a cache outside the repository. This module does without torch.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from conformance.errors import UsageFault
from conformance.npu import SITE

#: The versions read: what is emulated, two older ones, and the one of the torch that stacks/ pins.
VERSIONS = ("2.6.0", "2.8.0", "2.10.0", "2.13.0")
FACTS = Path(__file__).with_name("vendor_schemas.json")
FETCH = "python -m conformance.npu.schemas fetch"
WRITE = "python -m conformance.npu.schemas write"
LIBRARY = "torch_npu/lib/libtorch_npu.so"

# A schema: name, arguments, returns.
_SCHEMA = re.compile(r"[A-Za-z_]\w*(?:\.\w+)?\(.*\) -> .+", re.ASCII)
_ARROW = b") -> "
# Families of the vendor's that are smaller than this are not named.
_FAMILY = 5


class VendorFacts(BaseModel):
    """`vendor_schemas.json`. All versions are those of `declared`, in order.

    `declared`: version -> how many operators its library declares. `others`: version -> family -> how many operators it has
    that are not emulated; families are the first word after `npu_`, small ones together are `other`. `schemas`: emulated
    operator -> schema as torch prints it -> the versions that declare it so; a version in none lacks the operator.
    `differences`: version -> operator -> what the emulation has otherwise, in words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    written_by: str
    declared: dict[str, int]
    others: dict[str, dict[str, int]]
    schemas: dict[str, dict[str, list[str]]]
    differences: dict[str, dict[str, list[str]]]

    def of(self, version: str) -> dict[str, str]:
        """Operator -> its schema in that version; operators that the version lacks are left out."""
        return {op: text for op, texts in self.schemas.items() for text, having in texts.items() if version in having}


def read_facts(path: Path = FACTS) -> VendorFacts:
    """The facts that are kept; UsageFault when the file is not as written."""
    try:
        return VendorFacts.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as fault:
        raise UsageFault(f"{path}: {fault.strerror}; right form: {WRITE}") from None
    except (ValidationError, ValueError) as fault:
        cause = fault.errors()[0] if isinstance(fault, ValidationError) else {"loc": (), "msg": str(fault)}
        where = ".".join(str(part) for part in cause["loc"])
        raise UsageFault(f"{path}: {where or 'text'}: {cause['msg']}; right form: {WRITE}") from None


def emulated_version() -> str:
    """The version of torch_npu whose operators the emulation has."""
    return str(runpy.run_path(str(SITE / "torch_npu" / "version.py"))["__version__"])


def emulated_schemas() -> dict[str, str]:
    """Operator -> the schema that the emulation registers, as it is written there."""
    texts: tuple[str, ...] = runpy.run_path(str(SITE / "torch_npu" / "ops" / "schemas.py"))["SCHEMAS"]
    return {text.partition("(")[0]: text for text in texts}


def cache() -> Path:
    """Where the wheels are: under XDG_CACHE_HOME, else under ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "verl-mindspeed-conformance" / "torch_npu"


def wheel(version: str) -> Path | None:
    """The cached wheel of that version, if there is one."""
    return next(iter(sorted(cache().glob(f"torch_npu-{version}-*.whl"))), None)


def fetch(version: str) -> Path:
    """The wheel of that version, downloaded unless it is cached; UsageFault when pip does not get it.

    Any platform's wheel does, because nothing of it is run but Python files: it is always the one for Linux on x86_64.
    """
    found = wheel(version)
    if found is not None:
        return found
    try:
        cache().mkdir(parents=True, exist_ok=True)
        # Beside the cache and moved into it whole, so that an interrupted download is never taken for a wheel.
        with tempfile.TemporaryDirectory(dir=cache()) as unfinished:
            options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311"]
            for platform in ("manylinux_2_28_x86_64", "manylinux2014_x86_64"):
                options += ["--platform", platform]
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--retries",
                "1",  # where there is no network, that is known soon
                *options,
                "--dest",
                unfinished,
                f"torch_npu=={version}",
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            (downloaded, *_) = [*Path(unfinished).glob("*.whl"), None]
            if done.returncode or downloaded is None:
                said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
                raise UsageFault(f"torch_npu=={version}: pip download failed: {said[-1]}; right form: reach PyPI, then {FETCH}")
            return Path(shutil.move(downloaded, cache() / downloaded.name))
    except OSError as fault:
        raise UsageFault(f"{cache()}: {fault.strerror}; right form: XDG_CACHE_HOME=<a directory with 200 MB free>") from None


def member(path: Path, name: str) -> bytes:
    """A file out of a wheel; UsageFault when the wheel is broken or has no such file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(name)
    except KeyError:
        raise UsageFault(f"{path}: has no {name}; right form: a wheel of torch_npu from PyPI") from None
    except (zipfile.BadZipFile, OSError, EOFError) as fault:
        raise UsageFault(f"{path}: not a whole wheel ({fault}); right form: remove it, then {FETCH}") from None


def declared(library: bytes) -> dict[str, str]:
    """Operator (with its overload, `name.overload`) -> schema, from the strings of a library.

    UsageFault when it declares one operator in two ways: then this way of reading says nothing.
    """
    found: dict[str, str] = {}
    end, at = 0, library.find(_ARROW)
    while at != -1:
        # The C string around the arrow. Searching for the arrow is many times faster than a pattern over the whole library.
        start, end = library.rfind(b"\0", end, at) + 1, library.find(b"\0", at) % (len(library) + 1)
        text = library[start:end].decode("ascii", errors="replace")
        op = text.partition("(")[0]
        if _SCHEMA.fullmatch(text) and found.setdefault(op, text) != text:
            raise UsageFault(f"{op}: declared twice, as {found[op]} and as {text}")
        at = library.find(_ARROW, end)
    return found


def families(ops: Mapping[str, Any]) -> dict[str, int]:
    """How many of the operators belong to each family, large families first."""
    words = Counter(op.strip("_").removeprefix("npu_").partition(".")[0].partition("_")[0] for op in ops)
    large = {word: count for word, count in sorted(words.items(), key=lambda pair: (-pair[1], pair[0])) if count >= _FAMILY}
    rest = sum(words.values()) - sum(large.values())
    return {**large, **({"other": rest} if rest else {})}
