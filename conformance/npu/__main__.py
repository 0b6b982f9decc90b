"""`python -m conformance.npu [--npu MODE] SCRIPT ARGS` or `... -m MODULE ARGS`: run a program on the (emulated) NPU."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path
from typing import cast, get_args

from conformance.errors import UsageFault
from conformance.npu import SITE, SITE_MINDSPEED, Mode, activate, install_kernels

USAGE = "right form: python -m conformance.npu [--npu auto|emulated|real] (SCRIPT | -m MODULE) [ARGUMENT ...]"


def parse(arguments: list[str]) -> tuple[Mode, bool, str, list[str]]:
    """(mode, is it a module, script or module, its arguments); UsageFault for anything else. Ours end at the program's name."""
    mode, rest = "auto", arguments
    while rest and rest[0].startswith("--npu"):
        option, equals, value = rest[0].partition("=")
        if option != "--npu":
            break
        mode, rest = (value, rest[1:]) if equals else (rest[1] if len(rest) > 1 else "", rest[2:])
        if mode not in get_args(Mode):
            raise UsageFault(f"--npu {mode}: no such mode; {USAGE}")
    is_module = bool(rest) and rest[0] == "-m"
    rest = rest[1:] if is_module else rest
    if not rest:
        raise UsageFault(f"no program to run; {USAGE}")
    if not is_module and rest[0].startswith("-"):
        raise UsageFault(f"unknown option {rest[0]}; {USAGE}")
    return cast(Mode, mode), is_module, rest[0], rest[1:]


def _require_program(program: str, *, is_module: bool) -> None:
    if not is_module:
        if not any(path.is_file() for path in (Path(program), Path(program, "__main__.py"))):
            raise UsageFault(f"{program}: no such script; {USAGE}")
        return
    try:
        found = importlib.util.find_spec(program)
    except ModuleNotFoundError as fault:
        raise UsageFault(f"-m {program}: no module named {fault.name!r}; {USAGE}") from None
    if found is None:
        raise UsageFault(f"-m {program}: no such module; {USAGE}")
    if found.submodule_search_locations is not None and importlib.util.find_spec(f"{program}.__main__") is None:
        raise UsageFault(f"-m {program}: a package without __main__ cannot be run; {USAGE}")


def run(arguments: list[str]) -> None:
    """Activate, then run the program as `__main__` with its own sys.argv and sys.path[0], as the interpreter would."""
    mode, is_module, program, rest = parse(arguments)
    # The interpreter would put the script's directory first; for -m the current directory is there already.
    if not is_module:
        sys.path[0] = str(Path(program).resolve().parent)
    _require_program(program, is_module=is_module)
    mindspeed = importlib.util.find_spec("mindspeed") is not None
    first = sys.path[0]
    device = activate(mode, mindspeed=mindspeed)
    if device.name == "emulated":
        # Processes that the program starts (torchrun, ray) import torch_npu by themselves.
        sites = [str(SITE)] + ([str(SITE_MINDSPEED)] if mindspeed else [])
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*sites, *([inherited] if inherited else [])])
        if mindspeed:
            install_kernels()
    print(f"device: {device.name} (torch_npu {device.version})", file=sys.stderr)
    sys.path.remove(first)
    sys.path.insert(0, first)
    sys.argv = [program, *rest]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


def main() -> None:
    """The command; exit code 2 and one line for wrong usage."""
    try:
        run(sys.argv[1:])
    except UsageFault as fault:
        print(f"conformance.npu: {fault}", file=sys.stderr)
        sys.exit(fault.exit_code)


if __name__ == "__main__":
    main()
