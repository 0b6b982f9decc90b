"""torch.npu: the device module. Stands for torch_npu.npu over the Ascend runtime; there are eight devices, all the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from .._device import device_count, require_index
from .._strict import refuse_unknown
from . import amp, memory, random
from .config import config, set_compile_mode, set_option
from .memory import (
    NPUPluggableAllocator,
    change_current_allocator,
    empty_cache,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from .mstx import mstx
from .random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from .streams import Event, Stream, StreamContext, current_stream, default_stream, set_stream, stream
from .tensor_types import (
    BFloat16Tensor,
    BoolTensor,
    ByteTensor,
    CharTensor,
    DoubleTensor,
    FloatTensor,
    HalfTensor,
    IntTensor,
    LongTensor,
    ShortTensor,
)

__all__ = [
    "BFloat16Tensor", "BoolTensor", "ByteTensor", "CharTensor", "DoubleTensor", "Event", "FloatTensor", "HalfTensor",
    "IntTensor", "LongTensor", "NPUPluggableAllocator", "ShortTensor", "Stream", "StreamContext", "amp",
    "can_device_access_peer", "change_current_allocator", "config", "current_device", "current_stream", "default_generators",
    "default_stream", "device", "device_count", "device_of", "empty_cache", "get_device_capability", "get_device_name",
    "get_device_properties", "get_rng_state", "get_rng_state_all", "init", "initial_seed", "ipc_collect", "is_available",
    "is_bf16_supported", "is_initialized", "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_cached",
    "max_memory_reserved", "mem_get_info", "memory", "memory_allocated", "memory_cached", "memory_reserved",
    "memory_snapshot", "memory_stats", "memory_stats_as_nested_dict", "memory_summary", "mstx", "random",
    "reset_accumulated_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_memory_stats",
    "seed", "seed_all", "set_compile_mode", "set_device", "set_option", "set_per_process_memory_fraction", "set_rng_state",
    "set_rng_state_all", "set_stream", "stream", "synchronize", "utilization",
]  # fmt: skip

__getattr__ = refuse_unknown("torch_npu.npu")

_MEMORY_BYTES = 64 << 30
_current = 0


@dataclass(frozen=True)
class _DeviceProperties:
    """As torch_npu reports an Ascend 910B; the name says that it is none."""

    name: str = "Ascend910B (emulated)"
    total_memory: int = _MEMORY_BYTES
    multi_processor_count: int = 24
    cube_core_num: int = 24
    vector_core_num: int = 48
    L2_cache_size: int = 192 << 20


def _index(which: int | str | torch.device | None) -> int:
    """The index that a device argument means; None and an index-less "npu" mean the current device."""
    if isinstance(which, str):
        which = torch.device(which)
    if isinstance(which, torch.device):
        which = which.index
    index = _current if which is None else int(which)
    require_index(index, -1)
    return index


def is_available() -> bool:
    """Always: that is what the emulation is for."""
    return True


def current_device() -> int:
    """The index set by set_device, 0 at first."""
    return _current


def set_device(device: int | str | torch.device) -> None:
    """RuntimeError for an index that no emulated device has."""
    global _current
    _current = _index(device)


def synchronize(device: int | str | torch.device | None = None) -> None:
    """Nothing is asynchronous."""
    _index(device)


def init() -> None:
    """Nothing to initialize."""


def is_initialized() -> bool:
    """Always."""
    return True


def _lazy_init() -> None:
    """Nothing to initialize."""


def _lazy_call(cb: Callable[[], Any]) -> None:
    """The device is initialized, so the callback runs at once."""
    cb()


def _is_in_bad_fork() -> bool:
    """A forked process can use the emulation: it has no context to lose."""
    return False


def get_device_name(device_name: int | str | torch.device | None = None) -> str:
    """Begins like a 910B's, for code that looks for the series, and says that it is emulated."""
    return get_device_properties(device_name).name


def get_device_properties(device_name: int | str | torch.device | None = None) -> _DeviceProperties:
    """The same for every device."""
    _index(device_name)
    return _DeviceProperties()


def get_device_capability(device: int | str | torch.device | None = None) -> tuple[int, int]:
    """TORCH_NPU_DEVICE_CAPABILITY as "major.minor", else (8, 0). torch_npu returns None when the variable is unset, on which
    torch.distributed from torch 2.12 on fails."""
    _index(device)
    major, _, minor = os.environ.get("TORCH_NPU_DEVICE_CAPABILITY", "8.0").partition(".")
    return int(major), int(minor)


def mem_get_info(device: int | str | torch.device | None = None) -> tuple[int, int]:
    """(free, total) in bytes: all of it free, since allocations are not measured."""
    _index(device)
    return _MEMORY_BYTES, _MEMORY_BYTES


def can_device_access_peer(device_id: int, peer_device_id: int) -> bool:
    """All emulated devices share one memory."""
    return _index(device_id) != _index(peer_device_id)


def utilization(device: int | str | torch.device | None = None) -> int:
    """Per cent: not measured, 0."""
    _index(device)
    return 0


def is_bf16_supported() -> bool:
    """As on a 910B."""
    return True


def ipc_collect() -> None:
    """No memory is shared by handles."""


class device:
    """Context manager that makes another device current."""

    def __init__(self, device: int | str | torch.device | None) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> device:
        global _current
        self.prev_idx = _current
        if self.idx >= 0:
            _current = self.idx
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        global _current
        _current = self.prev_idx


class device_of(device):
    """The device of a tensor: the current one, since tensors carry none."""

    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(None if isinstance(obj, torch.Tensor) else -1)
