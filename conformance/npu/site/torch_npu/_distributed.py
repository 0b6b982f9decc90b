"""Registers `hccl` with torch.distributed, for NPU tensors and for the CPU tensors that they are here."""

from __future__ import annotations

import torch.distributed as dist

from ._C import _distributed_c10d


def is_hccl_available() -> bool:
    """Always, over Gloo."""
    return True


def install() -> None:
    """After this `init_process_group("hccl")` and `"cpu:gloo,npu:hccl"` work."""
    dist.Backend.register_backend("hccl", _distributed_c10d.create, extended_api=True, devices=["npu", "cpu"])
    dist.is_hccl_available = is_hccl_available  # type: ignore[attr-defined]
