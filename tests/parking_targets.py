"""What the tests of `conformance.parking` run in the warm process and in ranks."""

from __future__ import annotations

import sys

from conformance import backend
from conformance.backend import BackendSpec, Imported
from conformance.parking import Parked
from conformance.ranks import RankContext


def preload_unparked(spec: BackendSpec) -> Imported:
    """As the suite's own, with nothing set aside."""
    backend.Parked = lambda _packages: None  # type: ignore[assignment,misc]
    return backend.preload(spec)


def parked_count(_: object, __: RankContext) -> int:
    return sum(len(modules) for finder in sys.meta_path if isinstance(finder, Parked) for modules in finder.modules.values())


def patched_in_parked(extra: str | None, _: RankContext) -> list[str]:
    """Attributes of parked modules that are what MindSpeed patches: its original or its replacement. `extra` plants one."""
    from mindspeed.patch_utils import MindSpeedPatchesManager

    patches = {p.orig_func_name: p for p in MindSpeedPatchesManager.patches_info.values() if p.orig_func_name}
    finder = next(f for f in sys.meta_path if isinstance(f, Parked))
    modules = {name: module for group in finder.modules.values() for name, module in group.items()}
    if extra is not None:
        name, patch = next((n, p) for n, p in patches.items() if p.final_patch_func is not None)
        setattr(modules[extra], name, patch.final_patch_func)
    return [
        f"{module_name}.{name}"
        for module_name, module in modules.items()
        for name, value in vars(module).items()
        if name in patches and value is not None and value in (patches[name].orig_func, patches[name].final_patch_func)
    ]
