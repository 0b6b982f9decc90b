"""Importing this sends torch.cuda.* to torch.npu.*, device "cuda" to "npu", and backend "nccl" to "hccl"."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import npu
from .._C import _distributed_c10d
from .._device import add_type, type_prefix


def _hccl(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with "nccl" replaced in every string, as torch_npu does; "cpu:gloo,cuda:nccl" is such a string."""

    def translated(value: Any) -> Any:
        return value.replace("nccl", "hccl").replace("cuda", "npu") if isinstance(value, str) else value

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "backend" in kwargs:
            kwargs["backend"] = translated(kwargs["backend"])
        return function(*map(translated, args), **kwargs)

    return wrapper


def _transfer() -> None:
    add_type("cuda")
    cuda: Any = torch.cuda
    for name in npu.__all__:
        if name not in ("amp", "memory", "random"):
            setattr(cuda, name, getattr(npu, name))
    for name in npu.random.__all__:
        setattr(cuda.random, name, getattr(npu.random, name))
    for name in npu.amp.__all__:
        setattr(cuda.amp, name, getattr(npu.amp, name))
    for name in ("_lazy_call", "_lazy_init", "_is_in_bad_fork"):
        setattr(cuda, name, getattr(npu, name))
    cuda.memory._set_allocator_settings = npu.memory._set_allocator_settings
    cuda.DoubleTensor = npu.FloatTensor  # as torch_npu: the NPU has no float64
    tensor: Any = torch.Tensor
    tensor.cuda = tensor.npu
    tensor.is_cuda = tensor.is_npu
    module: Any = torch.nn.Module
    module.cuda = module.npu
    distributed: Any = dist
    distributed.init_process_group = _hccl(dist.init_process_group)
    distributed.distributed_c10d._new_group_with_tag = _hccl(dist.distributed_c10d._new_group_with_tag)
    distributed.is_nccl_available = distributed.is_hccl_available
    distributed.ProcessGroupNCCL = _distributed_c10d.ProcessGroupHCCL
    distributed.distributed_c10d.ProcessGroupNCCL = _distributed_c10d.ProcessGroupHCCL
    if "mindspeed" not in sys.modules:
        # Megatron's distributed optimizer accepts the names torch.cuda.FloatTensor and so on only. MindSpeed renames them
        # itself; without it there is no Megatron on NPUs, so torch_npu never had to.
        type_prefix[0] = "torch.cuda."


_transfer()
