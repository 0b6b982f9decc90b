"""The layers that megatron-core subclasses, and the modules that it imports."""

from . import attention, distributed, fp8, ops, tensor
from .attention import DotProductAttention
from .fp8 import fp8_autocast, fp8_model_init
from .grouped import GroupedLinear
from .linear import LayerNormLinear, Linear
from .norm import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "attention",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "tensor",
]
