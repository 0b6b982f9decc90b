"""torch_npu._C: stands for the C++ extension. Only what MindSpeed and Megatron name."""

from __future__ import annotations

from .._strict import refuse_unknown
from . import _distributed_c10d

__all__ = ["_distributed_c10d"]

__getattr__ = refuse_unknown("torch_npu._C")
