"""Stands for transformer_engine.pytorch.distributed."""

from __future__ import annotations

import contextlib
from typing import Any

from transformer_engine.pytorch.strict import PlainBackendError


class CudaRNGStatesTracker:
    """Raises when made: megatron-core's own tracker is the one in use unless use_te_rng_tracker is set."""

    def __init__(self) -> None:
        raise PlainBackendError("use_te_rng_tracker: the plain backend has no RNG tracker of its own")


def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Tells FP8 modules about recomputation; there are none, so there is nothing to tell."""
    del activation_recompute, recompute_phase
    return contextlib.nullcontext()


def checkpoint(*_args: Any, **_kwargs: Any) -> None:
    """megatron-core calls this with FP8 only."""
    raise PlainBackendError("checkpoint: the plain backend has no FP8")


def get_all_rng_states() -> dict[str, Any]:
    """megatron-core calls this with use_te_rng_tracker only."""
    raise PlainBackendError("use_te_rng_tracker: the plain backend has no RNG tracker of its own")
