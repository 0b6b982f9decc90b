"""triton.runtime.jit: the decorator, and the classes that torch tests for."""
# ruff: noqa: ARG002 - the signatures are the real ones

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from .._strict import refuse_unknown

__getattr__ = refuse_unknown("triton.runtime.jit")


#: Modules whose kernels MindSpeed can do without: on an ImportError it sorts chunks of tokens by torch functions. With the
#: kernels it would also insist on `tensor.device.type == "npu"`.
DISPENSABLE = ("mindspeed.ops.triton.sort_chunks_by_idx",)


class KernelInterface:
    """`kernel[grid](...)`; raises when launched."""

    fn: Any

    def __getitem__(self, grid: Any) -> Callable[..., NoReturn]:
        return self.run

    def run(self, *args: Any, **kwargs: Any) -> NoReturn:
        """RuntimeError: there is no compiler."""
        name = getattr(self.fn, "__name__", repr(self.fn))
        raise RuntimeError(f"triton kernel {name}: triton kernels do not run on the emulated NPU")


class JITFunction(KernelInterface):
    """A decorated kernel."""

    def __init__(self, fn: Callable[..., Any], **options: Any) -> None:
        if fn.__module__ in DISPENSABLE:
            raise ImportError(f"triton kernel {fn.__module__}.{fn.__name__}: triton kernels do not run on the emulated NPU")
        self.fn = fn
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.run()


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`@jit` and `@jit(option=...)`."""
    return functools.partial(JITFunction, **options) if fn is None else JITFunction(fn)
