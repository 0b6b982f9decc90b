"""The `plain` backend: Transformer Engine's interface in plain torch, where neither it nor MindSpeed is installed.

`PATH` holds a package named `transformer_engine`, over which megatron-core 0.16's own layers run unmodified. It is on
the import path only after `activate()`. There is no distribution metadata beside it, on purpose: megatron-core and
verl go by the module, while accelerate and others that ask for the distribution must hear that it is not installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from conformance.errors import UsageFault

PATH = Path(__file__).resolve().parent / "site"
_NAME = "transformer_engine"


def activate() -> None:
    """Put `PATH` first on `sys.path`. Call it before `megatron.core` is imported: that looks for the module.

    Calling it again changes nothing. UsageFault: another `transformer_engine` is imported, or could be.
    """
    # find_spec would raise for an imported module without a spec, as stubs are.
    location = _location(sys.modules.get(_NAME) or importlib.util.find_spec(_NAME))
    if location is not None and not Path(location).is_relative_to(PATH):
        raise UsageFault(
            f"{_NAME} is present ({location}): backend plain stands in for it and cannot be used beside it; "
            "right form: uninstall it, or choose another backend"
        )
    if str(PATH) not in sys.path:
        sys.path.insert(0, str(PATH))


def _location(found: object) -> str | None:
    """Where a module or a module spec comes from; its `repr` if it has no file, as a stub put into `sys.modules`."""
    if found is None:
        return None
    file = getattr(found, "__file__", None) or getattr(found, "origin", None)
    return str(file) if file else repr(found)
