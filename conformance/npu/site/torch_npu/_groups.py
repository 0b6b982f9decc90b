"""Communicators by name: MC2 operators take the name of an HCCL communicator, a string, and talk over it.

Stands for the table of communicators inside HCCL.
"""

from __future__ import annotations

from typing import Any

_by_name: dict[str, Any] = {}
_kept: list[Any] = []


def keep(backend: Any) -> None:
    """Torch holds a group's C++ half only; without a reference here its Python half, which has the name, would vanish."""
    _kept.append(backend)


def register(backend: Any, group: str) -> str:
    """The name by which `group_of` finds `backend`; made of the group's name, so that it differs between groups."""
    name = f"emulated_hccl_{group}"
    _by_name[name] = backend
    return name


def group_of(name: str) -> Any:
    """The process group of that communicator; RuntimeError when there is none."""
    try:
        return _by_name[name]
    except KeyError:
        known = ", ".join(sorted(_by_name)) or "none"
        raise RuntimeError(
            f"no HCCL communicator is named {name!r} (known: {known}); ask the group's get_hccl_comm_name"
        ) from None
