"""triton.compiler: the classes that torch imports."""

from __future__ import annotations

from .._strict import refuse_unknown
from .compiler import ASTSource, CompiledKernel

__all__ = ["ASTSource", "CompiledKernel"]

__getattr__ = refuse_unknown("triton.compiler")
