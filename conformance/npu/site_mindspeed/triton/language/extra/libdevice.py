"""triton.language.extra.libdevice: device functions that kernels would call."""

from __future__ import annotations

from ..._strict import refuse_unknown

__getattr__ = refuse_unknown("triton.language.extra.libdevice")
