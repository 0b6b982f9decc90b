"""triton.runtime."""

from __future__ import annotations

from .._strict import refuse_unknown
from . import autotuner, cache, driver, jit

__all__ = ["autotuner", "cache", "driver", "jit"]

__getattr__ = refuse_unknown("triton.runtime")
