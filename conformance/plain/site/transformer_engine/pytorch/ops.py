"""The operation-based interface: names in megatron-core's annotations and fused MLP. None can be made."""

from ..errors import Unsupported


class FusibleOperation(Unsupported):
    """Base of the operations."""


class Sequential(Unsupported):
    """Container of operations (`use_transformer_engine_op_fuser`)."""


class SwiGLU(FusibleOperation):
    """Activation (`use_te_activation_func`), as are the following."""


class GEGLU(FusibleOperation): ...


class ReGLU(FusibleOperation): ...


class GELU(FusibleOperation): ...


class ReLU(FusibleOperation): ...
