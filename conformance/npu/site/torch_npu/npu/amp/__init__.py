"""torch.npu.amp: stands for the NPU's mixed precision. autocast is torch's own, redirected to the CPU; scaling is torch's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..._strict import refuse_unknown

__getattr__ = refuse_unknown("torch_npu.npu.amp")

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]

GradScaler = functools.partial(torch.amp.GradScaler, "cpu")


class autocast(torch.autocast):
    """torch.npu.amp.autocast: float16 unless told otherwise."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("npu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


def custom_fwd(fwd: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """torch.amp.custom_fwd for the emulated device."""
    return torch.amp.custom_fwd(fwd, device_type="cpu", cast_inputs=cast_inputs)


def custom_bwd(bwd: Callable[..., Any]) -> Any:
    """torch.amp.custom_bwd for the emulated device."""
    return torch.amp.custom_bwd(bwd, device_type="cpu")
