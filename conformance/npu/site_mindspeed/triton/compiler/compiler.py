"""triton.compiler.compiler: the classes that torch imports."""

from __future__ import annotations

from .._strict import refuse_unknown

__getattr__ = refuse_unknown("triton.compiler.compiler")


class ASTSource:
    """A kernel's source."""


class CompiledKernel:
    """A kernel's binary; none is ever made."""
