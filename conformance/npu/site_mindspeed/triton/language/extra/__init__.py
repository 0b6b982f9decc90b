"""triton.language.extra."""

from __future__ import annotations

from ..._strict import refuse_unknown
from . import libdevice

__all__ = ["libdevice"]

__getattr__ = refuse_unknown("triton.language.extra")
