"""The precision in which norms and softmax compute."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """`x` in float32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()
