"""RMSNorm and LayerNorm over the last dimension, computed in float32 (float64 for float64) and rounded once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .numeric import wide
from .parameters import filled, mark

Device = torch.device | str | int


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered_gamma: bool) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * gamma`; gamma is `weight`, or `1 + weight` if zero-centred. Shape, dtype of `x`."""
    wide_x = wide(x)
    normed = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    return (normed * _gamma(weight, zero_centered_gamma)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered_gamma: bool) -> Tensor:
    """`(x - mean) / sqrt(var + eps) * gamma + bias`, with the biased variance. Shape and dtype of `x`."""
    wide_x = wide(x)
    centred = wide_x - wide_x.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (normed * _gamma(weight, zero_centered_gamma) + wide(bias)).to(x.dtype)


def _gamma(weight: Tensor, zero_centered_gamma: bool) -> Tensor:
    return wide(weight) + 1 if zero_centered_gamma else wide(weight)


class _Norm(nn.Module):
    """What both norms share: `weight` of shape (hidden,), marked for the all-reduce under sequence parallelism."""

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Device = "cuda",
    ) -> None:
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise ValueError(f"{type(self).__name__}: give one of normalized_shape and hidden_size")
        self.hidden_size = hidden_size or normalized_shape or 0
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = filled(self.hidden_size, 0.0 if zero_centered_gamma else 1.0, params_dtype, device)
        mark(self.weight, sequence_parallel=bool(sequence_parallel))


class RMSNorm(_Norm):
    """Root-mean-square norm. Parameter: `weight`."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)


class LayerNorm(_Norm):
    """Layer norm. Parameters: `weight`, `bias`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = filled(self.hidden_size, 0.0, self.weight.dtype, self.weight.device)
        mark(self.bias, sequence_parallel=self.weight.sequence_parallel)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, self.zero_centered_gamma)
