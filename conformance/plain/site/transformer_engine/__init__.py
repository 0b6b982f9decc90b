"""A stand-in for NVIDIA's Transformer Engine (which needs CUDA), as far as megatron-core's extension reaches it.

The version is the one that MindSpeed claims for its own stand-in, so that megatron-core's version gates decide alike on
both backends.
"""

from transformer_engine import common, pytorch

__version__ = "2.2.0"
__all__ = ["__version__", "common", "pytorch"]
