"""triton.backends.compiler: the classes that torch imports."""

from __future__ import annotations

from dataclasses import dataclass

from .._strict import refuse_unknown

__getattr__ = refuse_unknown("triton.backends.compiler")


@dataclass(frozen=True)
class GPUTarget:
    """A device to compile for."""

    backend: str
    arch: int | str
    warp_size: int
