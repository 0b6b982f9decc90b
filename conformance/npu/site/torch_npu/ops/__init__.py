"""The operators of namespace `npu`, for CPU tensors: torch_npu's schemas, numerics checked against plain PyTorch.

Importing this package registers them with torch.library. `EXPORTS` maps the names that torch_npu has as functions to
`torch.ops.npu.<name>`. An argument value that the emulation lacks raises NotImplementedError, an input that the
vendor's documentation forbids RuntimeError.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import (
    activation,
    attention,
    grouped_matmul,
    mc2,
    memory,
    moe,
    moe_routing_map,
    norm,
    optimizer,
    rotary,
    softmax,
)
from .schemas import SCHEMAS

__all__ = [
    "EXPORTS",
    "activation",
    "attention",
    "grouped_matmul",
    "mc2",
    "memory",
    "moe",
    "moe_routing_map",
    "norm",
    "optimizer",
    "rotary",
    "softmax",
]

EXPORTS: dict[str, Callable[..., Any]] = {
    name: getattr(torch.ops.npu, name) for name in dict.fromkeys(s.split("(")[0].split(".")[0] for s in SCHEMAS)
}
