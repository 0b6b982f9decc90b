"""A triton that can decorate but not run. Stands for triton-ascend.

MindSpeed core_r0.16.0 imports triton and decorates kernels with it when it is imported, whether or not a feature uses one. No
feature of the conformance matrix does; launching a kernel raises. Not for use without MindSpeed: torch.compile would
believe that it has a compiler.
"""

from __future__ import annotations

from . import compiler, language, runtime
from ._strict import refuse_unknown
from .runtime.autotuner import Autotuner, Config, Heuristics, autotune, heuristics
from .runtime.jit import JITFunction, KernelInterface, jit

__all__ = [
    "Autotuner", "Config", "Heuristics", "JITFunction", "KernelInterface", "autotune", "cdiv", "compiler", "heuristics",
    "jit", "language", "next_power_of_2", "runtime",
]  # fmt: skip

__version__ = "3.2.0"

__getattr__ = refuse_unknown("triton")


def cdiv(x: int, y: int) -> int:
    """Quotient of positive numbers, rounded up."""
    return (x + y - 1) // y


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not less than `n`."""
    return 1 << max(n - 1, 0).bit_length()
