"""MindSpeed for a stack: from MINDSPEED_HOME, or by git from where the stack's file says; else none, and the run is plain."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import UsageFault
from conformance.stack import find_mindspeed
from conformance.stackfile import StackFile

#: A clone of MindSpeed is some 100 MB; a machine without a network shall hear so within minutes.
_TIMEOUT_S = 300
_MARK = Path("mindspeed", "megatron_adaptor.py")


@dataclass(frozen=True)
class Checkout:
    """Where it is (None: nowhere), and one line that says where from."""

    home: Path | None
    said: str


def mindspeed_for(stack: StackFile, cache: Path, environment: Mapping[str, str] = os.environ) -> Checkout:
    """MindSpeed of the stack's branch; what git fetches is kept under `cache`. UsageFault for a MINDSPEED_HOME that is none.

    MINDSPEED_HOME may be a checkout of that branch, or a clone that has the branch, which is left as it is.
    """
    if stack.mindspeed is None:
        return Checkout(None, f"stacks/{stack.name}.txt names no MindSpeed: this run is plain")
    address, branch = stack.mindspeed
    named = environment.get("MINDSPEED_HOME")
    found = find_mindspeed(dict(environment)) if named else None
    if found is not None and (found.branch == branch or found.commit is None):
        return Checkout(found.home, f"MindSpeed: {found.branch or 'no git checkout, branch unknown'}, as MINDSPEED_HOME has it")
    kept = cache / branch
    if (kept / _MARK).is_file():
        return Checkout(kept, f"MindSpeed: {branch}, fetched before into {kept}")
    if found is not None:
        for ref in (f"refs/heads/{branch}", f"refs/remotes/origin/{branch}"):
            if _fetch(str(found.home), ref, branch, kept):
                return Checkout(kept, f"MindSpeed: {branch}, from the clone that MINDSPEED_HOME names")
    if _fetch(address, f"refs/heads/{branch}", branch, kept):
        return Checkout(kept, f"MindSpeed: {branch}, from {address}")
    tried = "MINDSPEED_HOME has another branch" if found is not None else "MINDSPEED_HOME is not set"
    return Checkout(None, f"no MindSpeed: {tried}, and git could not fetch {branch} from {address}: this run is plain")


def _fetch(source: str, ref: str, branch: str, target: Path) -> bool:
    """Fetch one ref into a new checkout; True when MindSpeed is there. Nothing is left where it fails."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=".fetching-"))
    except OSError as fault:
        raise UsageFault(f"{target}: cannot be written: {fault.strerror}") from None
    try:
        for command in (
            ("init", "--quiet", "--initial-branch", branch),
            ("fetch", "--quiet", "--depth", "1", "--", source, ref),
            ("reset", "--quiet", "--hard", "FETCH_HEAD"),
        ):
            environment = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
            arguments = ["git", "-C", str(fresh), *command]
            subprocess.run(arguments, check=True, capture_output=True, timeout=_TIMEOUT_S, env=environment)
        if not (fresh / _MARK).is_file():
            return False
        fresh.rename(target)
    except (subprocess.SubprocessError, OSError):
        return False  # no git, no network, no such branch, or a full disk: the caller says what it tried
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return True
