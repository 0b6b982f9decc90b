"""triton.language.math: MindSpeed gives these names of its own at import; only kernels would call them."""
# ruff: noqa: ARG001 - the signatures are the real ones

from __future__ import annotations

from typing import Any, NoReturn

from .._strict import refuse_unknown

__getattr__ = refuse_unknown("triton.language.math")


def _inside_kernels_only(x: Any) -> NoReturn:
    raise RuntimeError("triton kernels do not run on the emulated NPU")


exp = exp2 = log = log2 = _inside_kernels_only
