"""Transformer Engine's interface, as far as megatron-core 0.16 reaches, in plain torch: short, strict, obviously right.

An argument is honoured, or has a value that changes no number, or raises `PlainBackendError`. Names that megatron-core
imports under `try/except ImportError` and can do without (fused optimizers, permutation, rotary embedding,
cross-entropy, CUDA graphs, CPU offload) are absent, so that its own fallback or its own refusal speaks.
"""

from . import common, pytorch
from .errors import PlainBackendError

# megatron-core asks `is_te_min_version` all over. 2.2.0 is the version with the fewest paths of its own:
# - 1.10 and 1.12 are needed for padded packed sequences, unlike key and value head sizes, softmax_scale, cp_comm_type;
# - 2.0 makes the extra state a byte tensor; below it, FP8 helpers import classes at module level that we would have
#   to fake;
# - from 2.2 on, the FP8 helpers need nothing but `tensor.QuantizedTensor`, an `isinstance` target;
# - below 2.3, megatron-core itself refuses delay_wgrad_compute and symmetric all-reduce, with a clear error;
# - below 2.7, it does not import the fused router unconditionally; below 2.8 to 2.10, it refuses softmax_type,
#   qk-clip and num_splits itself.
__version__ = "2.2.0"

__all__ = ["PlainBackendError", "__version__", "common", "pytorch"]
