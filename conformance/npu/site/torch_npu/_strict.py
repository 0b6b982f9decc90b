"""What the emulation lacks says so: a module-level `__getattr__` for every emulated module.

Nothing here answers for unknown names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def refuse_unknown(module: str) -> Callable[[str], NoReturn]:
    """A module `__getattr__` that raises AttributeError naming `module`, the attribute, and the emulation."""

    def missing(name: str) -> NoReturn:
        raise AttributeError(f"module {module!r} has no attribute {name!r}: the emulated NPU does not implement it")

    return missing


def not_emulated(what: str) -> NotImplementedError:
    """The error for a function that exists but whose argument value or effect the emulation cannot honour."""
    return NotImplementedError(f"{what} is not implemented by the emulated NPU")
