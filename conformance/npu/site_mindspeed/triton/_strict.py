"""Names that the stand-in lacks raise, so that a missing one is found where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def refuse_unknown(module: str) -> Callable[[str], NoReturn]:
    """A module `__getattr__` that raises AttributeError naming `module` and the attribute."""

    def missing(name: str) -> NoReturn:
        raise AttributeError(f"module {module!r} has no attribute {name!r}: it only stands in for triton on the emulated NPU")

    return missing
