"""What the tests of the plain backend share: loading it inside pytest, and comparing values and gradients with an oracle."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from conformance import plain


@contextlib.contextmanager
def plain_package() -> Iterator[ModuleType]:
    """`transformer_engine.pytorch` of the plain backend; afterwards neither sys.path nor sys.modules knows of it."""
    assert not _loaded(), "transformer_engine is imported already"
    plain.activate()
    try:
        import transformer_engine.pytorch

        yield transformer_engine.pytorch
    finally:
        sys.path.remove(str(plain.PATH))
        for name in _loaded():
            del sys.modules[name]


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal values, the same ones for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """function(*inputs), and the gradients of its product with fixed random values by each of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    upstream = draw(*out.shape, seed=99, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def assert_same(ours: Callable[..., Tensor], oracle: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    """Values and gradients of the two agree to float64 rounding."""
    names = ["value", *(f"gradient {i}" for i in range(len(inputs)))]
    for name, left, right in zip(names, with_gradients(ours, inputs), with_gradients(oracle, inputs), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
