"""acl: pyACL, the Python interface of CANN's runtime. Stands for the module of that name that CANN's set_env.sh puts on the path.

MindSpeed imports it unguarded as soon as moe_grouped_gemm is repatched, and asks it for the series of the processor.
"""

from __future__ import annotations

from typing import NoReturn

__all__ = ["get_soc_name"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"module 'acl' has no attribute {name!r}: it only stands in for pyACL on the emulated NPU")


def get_soc_name() -> str:
    """The series that torch_npu.npu.get_device_name() names too."""
    return "Ascend910B2"
