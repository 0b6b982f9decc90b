"""Stands for transformer_engine.pytorch.fp8: FP8 is always off, and asking for it raises."""

from __future__ import annotations

import contextlib
from typing import Any

from transformer_engine.pytorch.strict import PlainBackendError


class FP8GlobalStateManager:
    """Says that FP8 is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        raise PlainBackendError("FP8GlobalStateManager: the plain backend has no FP8")


def fp8_autocast(enabled: bool = True, **_kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """A context that does nothing when FP8 is not enabled."""
    if enabled:
        raise PlainBackendError("fp8_autocast(enabled=True): the plain backend has no FP8")
    return contextlib.nullcontext()


def fp8_model_init(enabled: bool = True, **_kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """As fp8_autocast."""
    return fp8_autocast(enabled=enabled)
