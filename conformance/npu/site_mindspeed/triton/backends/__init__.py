"""triton.backends: none."""

from __future__ import annotations

from .._strict import refuse_unknown
from . import compiler

__all__ = ["compiler"]

__getattr__ = refuse_unknown("triton.backends")
