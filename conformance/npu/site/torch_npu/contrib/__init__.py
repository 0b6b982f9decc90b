"""torch_npu.contrib: of its content only transfer_to_npu, which acts when it is imported."""

from __future__ import annotations

from .._strict import refuse_unknown

__getattr__ = refuse_unknown("torch_npu.contrib")
