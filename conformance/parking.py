"""Take idle packages out of `sys.modules`, so that what walks over all modules has fewer to walk over.

MindSpeed's repatch asks every module for every name that it patches: with verl's imports 6,000 modules, 1.7 million
questions and two seconds of CPU in every rank. Half of the modules belong to packages that come along with verl and take no
part in a step. They are set aside in the warm server; an import brings a package back, the very same module objects, unexecuted.

Nothing is hidden from repatch that it would change: `tests/test_parking.py` looks for attributes of the parked modules that
MindSpeed patches, and compares a step with and without parking.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType


class Parked(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The packages set aside, and the finder and loader that bring them back."""

    def __init__(self, packages: Iterable[str]) -> None:
        self.modules: dict[str, dict[str, ModuleType]] = {name: {} for name in packages}
        for name in list(sys.modules):
            package = _package_of(name, self.modules)
            if package is not None:
                self.modules[package][name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """For a parked module: its whole package is back, but for the module itself, which the import puts in its place."""
        package = _package_of(fullname, self.modules)
        if package is None:
            return None
        modules = self.modules.pop(package)
        module = modules.pop(fullname, None)
        sys.modules.update(modules)
        if module is None:
            return None  # a module of the package that had never been imported: the usual finders know it
        return importlib.machinery.ModuleSpec(fullname, _Returning(module))


class _Returning(importlib.abc.Loader):
    """Loads a module that exists: nothing is executed, and its own spec stays."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._own_spec = module.__spec__

    def create_module(self, _spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec


def _package_of(name: str, packages: Iterable[str]) -> str | None:
    return next((p for p in packages if name == p or name.startswith(p + ".")), None)
