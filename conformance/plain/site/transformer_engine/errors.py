"""How the plain backend says no."""

from __future__ import annotations

from typing import Any, NoReturn


class PlainBackendError(NotImplementedError):
    """The plain backend does not do what was asked for: names the class, the argument and its value."""


def refuse(owner: str, argument: str, value: object, why: str = "not supported") -> NoReturn:
    """Raise for an argument whose value would change the result and is not honoured."""
    raise PlainBackendError(f"plain backend: {owner}({argument}={value!r}): {why}")


def only(owner: str, allowed: object, **arguments: object) -> None:
    """Refuse every one of `arguments` that is not `allowed`: those that are accepted only at their neutral value."""
    for name, value in arguments.items():
        # Tensors compare element by element, so types first.
        if value is not allowed and not (type(value) is type(allowed) and value == allowed):
            refuse(owner, name, value)


class Unsupported:
    """Base of the classes that megatron-core needs by name, as a base class or for `isinstance`, but not for use."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise PlainBackendError(f"plain backend: {type(self).__name__} is not supported")
