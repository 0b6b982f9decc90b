"""torch_npu.utils.collect_env: there is no CANN; its version is the one that goes with the emulated torch_npu."""

from __future__ import annotations

from .._strict import refuse_unknown

__getattr__ = refuse_unknown("torch_npu.utils.collect_env")


def get_cann_version() -> str:
    """A version that MindSpeed's comparisons accept."""
    return "8.5.0"
