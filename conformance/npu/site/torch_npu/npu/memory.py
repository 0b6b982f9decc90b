"""torch.npu.memory: stands for the NPU caching allocator. Allocations are not measured: every count is 0 bytes."""
# ruff: noqa: ARG001, ARG002 - the signatures are the real ones

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from .._strict import not_emulated, refuse_unknown

__getattr__ = refuse_unknown("torch_npu.npu.memory")


def empty_cache() -> None:
    """No cache."""


def memory_allocated(device: Any = None) -> int:
    """Bytes: not measured, 0."""
    return 0


def max_memory_allocated(device: Any = None) -> int:
    """Bytes: not measured, 0."""
    return 0


def memory_reserved(device: Any = None) -> int:
    """Bytes: not measured, 0."""
    return 0


def max_memory_reserved(device: Any = None) -> int:
    """Bytes: not measured, 0."""
    return 0


memory_cached = memory_reserved
max_memory_cached = max_memory_reserved


def memory_stats(device: Any = None) -> OrderedDict[str, Any]:
    """The keys that callers index, all 0."""
    keys = (f"{what}.all.{when}" for what in ("allocated_bytes", "reserved_bytes", "active_bytes", "allocation")
            for when in ("current", "peak", "allocated", "freed"))  # fmt: skip
    return OrderedDict((key, 0) for key in (*keys, "num_alloc_retries", "num_ooms"))


def memory_stats_as_nested_dict(device: Any = None) -> dict[str, Any]:
    """Empty: not measured."""
    return {}


def memory_snapshot() -> list[dict[str, Any]]:
    """No segments."""
    return []


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """One line that says why there are no numbers."""
    return "the emulated NPU does not measure memory"


def reset_peak_memory_stats(device: Any = None) -> None:
    """Nothing to reset."""


reset_accumulated_memory_stats = reset_peak_memory_stats
reset_max_memory_allocated = reset_peak_memory_stats
reset_max_memory_cached = reset_peak_memory_stats


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    """No limit is enforced; ValueError outside [0, 1] as on hardware."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")


def _set_allocator_settings(settings: str) -> None:
    """Settings of an allocator that there is not."""


class NPUPluggableAllocator:
    """Stands for an allocator in a shared library. MindSpeed only names the class at import; making one raises."""

    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str) -> None:
        raise not_emulated(f"torch_npu.npu.memory.NPUPluggableAllocator({path_to_so_file!r})")


def change_current_allocator(allocator: NPUPluggableAllocator) -> None:
    """Unreachable without an NPUPluggableAllocator."""
    raise not_emulated("torch_npu.npu.memory.change_current_allocator")
