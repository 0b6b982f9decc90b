"""RMSNorm and LayerNorm over the last dimension. Computed in float32 (float64 for float64), returned in the input's dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from transformer_engine.pytorch.strict import refuse


def mark(parameter: nn.Parameter, **attributes: object) -> None:
    """Set the attributes that megatron-core reads off parameters: how it is sharded, over which group it is reduced."""
    for name, value in attributes.items():
        setattr(parameter, name, value)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """x: (..., h); weight: (h,). x / rms(x) * weight, or * (1 + weight) when zero-centred."""
    wide = torch.promote_types(x.dtype, torch.float32)
    xw = x.to(wide)
    scale = weight.to(wide) + 1 if zero_centered else weight.to(wide)
    return (xw * torch.rsqrt(xw.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """x: (..., h); weight, bias: (h,)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(wide) - x.to(wide).mean(-1, keepdim=True)
    scale = weight.to(wide) + 1 if zero_centered else weight.to(wide)
    variance = centred.square().mean(-1, keepdim=True)
    return (centred * torch.rsqrt(variance + eps) * scale + bias.to(wide)).to(x.dtype)


class RMSNorm(nn.Module):
    """Stands for transformer_engine.pytorch.RMSNorm."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        zero_centered_gamma: bool = False,
        device: Any = None,
        **other: Any,
    ) -> None:
        refuse("RMSNorm", other, {})
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(fill(hidden_size, dtype=params_dtype, device=device))
        mark(self.weight, sequence_parallel=sequence_parallel)  # megatron-core reduces such gradients over TP

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)


class LayerNorm(RMSNorm):
    """Stands for transformer_engine.pytorch.LayerNorm."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps, **kwargs)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))
        mark(self.bias, sequence_parallel=getattr(self.weight, "sequence_parallel"))  # noqa: B009

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.zero_centered_gamma)
