"""torch_npu.utils: the two modules of it that MindSpeed and verl import."""

from __future__ import annotations

from .._strict import refuse_unknown
from . import collect_env, flops_count
from .collect_env import get_cann_version

__all__ = ["collect_env", "flops_count", "get_cann_version"]

__getattr__ = refuse_unknown("torch_npu.utils")
