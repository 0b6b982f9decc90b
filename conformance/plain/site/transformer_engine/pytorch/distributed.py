"""What megatron-core imports from Transformer Engine's `distributed` for FP8 recompute and CUDA graphs. None is
supported.

Recompute itself is megatron-core's own unless FP8 is on, and its own random-state tracker is the default.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import PlainBackendError, Unsupported


class CudaRNGStatesTracker(Unsupported):
    """Base of megatron-core's TECudaRNGStatesTracker (`te_rng_tracker`)."""


def checkpoint(*_args: Any, **_kwargs: Any) -> NoReturn:
    """megatron-core recomputes through this under FP8 only."""
    raise PlainBackendError("plain backend: distributed.checkpoint serves FP8 recompute, which is not supported")


def activation_recompute_forward(*_args: Any, **_kwargs: Any) -> NoReturn:
    """megatron-core enters this under FP8 only."""
    raise PlainBackendError(
        "plain backend: distributed.activation_recompute_forward serves FP8 recompute, which is not supported"
    )


def get_all_rng_states() -> NoReturn:
    """megatron-core asks this of a CudaRNGStatesTracker only, and there is none."""
    raise PlainBackendError("plain backend: distributed.get_all_rng_states: there is no CudaRNGStatesTracker")
