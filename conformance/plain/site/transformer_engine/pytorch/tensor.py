"""Quantised tensors: none exist."""

from ..errors import Unsupported


class QuantizedTensor(Unsupported):
    """What megatron-core tests parameters against: no tensor is one."""
