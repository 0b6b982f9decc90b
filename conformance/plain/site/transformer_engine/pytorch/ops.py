"""Stands for transformer_engine.pytorch.ops: base classes that megatron-core's unused fused MLP names at import."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.strict import PlainBackendError


class FusibleOperation:
    """Raises when made."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise PlainBackendError(f"{type(self).__name__}: the plain backend has no operation fuser")


class Sequential(FusibleOperation):
    """Raises when made."""
