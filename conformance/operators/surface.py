"""Where the operators run, and tensors for them: drawn on the CPU from a seed, so that every device sees the same numbers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Dtype = Literal["float32", "bfloat16", "float16"]
#: How a tensor lies in memory; see `lay_out`.
Strides = Literal["contiguous", "sliced", "transposed", "expanded"]


@dataclass(frozen=True)
class Surface:
    """A device under test. `kernels` holds MindSpeed's compiled kernels by name, where they can be had.

    `communicator` is the name of the group of a job with several ranks.
    """

    device: str
    kernels: Mapping[str, Any] = field(default_factory=dict)
    communicator: str = ""

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor on the device."""
        return tensor.to(self.device)


def active(rank: int) -> Surface:
    """The surface of the torch_npu that this process has imported; the device with the rank's number."""
    torch_npu: Any = sys.modules["torch_npu"]
    torch_npu.npu.set_device(rank)
    ops = getattr(torch_npu, "ops", None)
    if not hasattr(ops, "EXPORTS"):  # the real one: MindSpeed would have to compile its kernels first
        return Surface(f"npu:{rank}")
    return Surface(f"npu:{rank}", importlib.import_module("conformance.npu.kernels").kernels(ops))


def dtype_of(name: Dtype) -> torch.dtype:
    """torch's dtype of that name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def normal(shape: Sequence[int], dtype: Dtype, seed: int, size: float = 1.0) -> Tensor:
    """Normally distributed numbers of that size, on the CPU, rounded to `dtype`."""
    generator = torch.Generator("cpu").manual_seed(seed)
    values = torch.empty(tuple(shape), dtype=torch.float64, device="cpu").normal_(generator=generator)
    return (values * size).to(dtype_of(dtype))


def whole(shape: Sequence[int], low: int, high: int, seed: int) -> Tensor:
    """Whole numbers from low to high - 1, int64, on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.empty(tuple(shape), dtype=torch.int64, device="cpu").random_(low, high, generator=generator)


@dataclass(frozen=True)
class Drawn:
    """The same numbers twice: plainly on the CPU, and on the device in the memory layout under test."""

    cpu: Tensor
    device: Tensor


def draw(surface: Surface, shape: Sequence[int], dtype: Dtype, strides: Strides, seed: int, size: float = 1.0) -> Drawn:
    """Normally distributed numbers. `expanded` repeats the first entry of dimension 0; the others change no value."""
    values = normal(shape, dtype, seed, size)
    if strides == "expanded" and values.numel():
        values = values[:1].expand(values.shape).contiguous()
    return Drawn(values, lay_out(values, strides, surface))


def lay_out(values: Tensor, strides: Strides, surface: Surface) -> Tensor:
    """CPU values on the device, in memory as `strides` says. What has fewer than two dimensions is not transposed."""
    if strides == "expanded" and values.numel():
        return surface.put(values[:1].contiguous()).expand(values.shape)
    if strides == "sliced":
        return surface.put(torch.stack((values, torch.full_like(values, 7.0)), -1).flatten(-2).contiguous())[..., ::2]
    if strides == "transposed" and values.dim() > 1:
        return surface.put(values.transpose(-1, -2).contiguous()).transpose(-1, -2)
    return surface.put(values.contiguous())
