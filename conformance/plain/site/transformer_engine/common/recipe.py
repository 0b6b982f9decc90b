"""Stands for transformer_engine.common.recipe: names that megatron-core refers to at import. There is no FP8 here."""

from __future__ import annotations

from enum import Enum
from typing import Any

from transformer_engine.pytorch.strict import PlainBackendError


class Format(Enum):
    """The FP8 formats by name; nothing computes in them."""

    E4M3 = "E4M3"
    HYBRID = "HYBRID"


class _NoRecipe:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise PlainBackendError(f"{type(self).__name__}: the plain backend has no FP8")


class DelayedScaling(_NoRecipe):
    """Raises when made."""


class Float8CurrentScaling(_NoRecipe):
    """Raises when made."""


class Float8BlockScaling(_NoRecipe):
    """Raises when made."""


class MXFP8BlockScaling(_NoRecipe):
    """Raises when made."""
