"""Strictness: an argument is honoured, or it is at the value that means nothing, or it is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PlainBackendError(NotImplementedError):
    """The plain backend was asked for something that it does not do."""


def refuse(owner: str, given: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    """Raise for every given argument that is unknown, or known and not at its neutral value."""
    for name, value in given.items():
        if name not in neutral:
            raise PlainBackendError(f"{owner}: unknown argument {name}={value!r}")
        if value != neutral[name]:
            raise PlainBackendError(f"{owner}: {name}={value!r} is not supported, only {neutral[name]!r}")
