"""triton.runtime.cache: torch asks for the key of its compile cache."""

from __future__ import annotations

from .._strict import refuse_unknown

__getattr__ = refuse_unknown("triton.runtime.cache")


def triton_key() -> str:
    """Constant: nothing is compiled."""
    return "emulated"
