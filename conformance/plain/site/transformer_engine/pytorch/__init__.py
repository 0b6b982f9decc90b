"""Stands for transformer_engine.pytorch."""

from transformer_engine.pytorch import distributed, fp8, ops, tensor
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.linear import GroupedLinear, LayerNormLinear, Linear
from transformer_engine.pytorch.norm import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "tensor",
]
