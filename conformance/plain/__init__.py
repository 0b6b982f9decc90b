"""The plain backend: a `transformer_engine` in plain torch, over which megatron-core's own extension runs unmodified.

Transformer Engine needs CUDA; on NPUs MindSpeed stands in for it. Without MindSpeed, this does: short, strict about
arguments that it does not honour, and sharing no code with MindSpeed, so that the two can be compared.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from conformance.errors import UsageFault

#: The directory that goes on sys.path when the backend is chosen, and only then.
PATH = Path(__file__).resolve().parent / "site"


def activate() -> None:
    """Put the package on the path; UsageFault when a real Transformer Engine is there, whose place this would take."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is not None and spec.origin and not Path(spec.origin).is_relative_to(PATH):
        raise UsageFault(
            "transformer_engine is installed: the plain backend cannot stand in for it; "
            "right form: uninstall it, or use --backend mindspeed"
        )
    if str(PATH) not in sys.path:
        sys.path.insert(0, str(PATH))
