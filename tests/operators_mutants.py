"""Faults to plant into the emulated operators: one replacement in the source of one function, undone afterwards."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.operators import Family
from conformance.operators.catalogue import CATALOGUE
from conformance.operators.explore import explore
from conformance.operators.job import run
from conformance.operators.profiles import Explored, OperatorSpec, Profile
from conformance.operators.surface import Surface
from conformance.operators.tolerance import judge
from conformance.ranks import RankContext


@dataclass(frozen=True)
class Mutant:
    """`function` is `module.name` in the package of operators, or `kernels.Class.name`; `caught` is part of the message."""

    name: str
    family: Family
    function: str
    old: str
    new: str
    caught: str


def find(function: str, ops: ModuleType) -> Callable[..., Any]:
    module, *names = function.split(".")
    found: Any = importlib.import_module("conformance.npu.kernels") if module == "kernels" else getattr(ops, module)
    for name in names:
        found = getattr(found, name)
    result: Callable[..., Any] = found
    return result


@contextlib.contextmanager
def planted(mutant: Mutant, ops: ModuleType) -> Iterator[None]:
    """The function's code with the fault in it. The dispatcher holds the function itself, so it sees the fault too."""
    function: Any = find(mutant.function, ops)
    source = textwrap.dedent(inspect.getsource(function))
    body = source[source.index("def ") :]
    assert body.count(mutant.old) == 1, f"{mutant.name}: {mutant.old!r} is {body.count(mutant.old)} times in {mutant.function}"
    namespace: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + body.replace(mutant.old, mutant.new), mutant.name, "exec")
    exec(code, function.__globals__, namespace)
    kept = function.__code__
    function.__code__ = namespace[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = kept


def explored(family: Family, surface: Surface, home: Path, examples: int = 30) -> Explored:
    """The family in this process, with few drawn cases."""
    check = CATALOGUE[family].check
    return explore(family, Profile(examples, True), lambda case: judge(check(case, surface)), str(home))


@dataclass(frozen=True)
class MutantJob:
    """A family on several ranks with a fault in each of them."""

    mutant: Mutant | None
    spec: OperatorSpec


def run_mutant(job: MutantJob, context: RankContext) -> Explored | None:
    """What `conformance.operators.job:run` does, with the fault planted."""
    ops = importlib.import_module("torch_npu.ops")
    with planted(job.mutant, ops) if job.mutant else contextlib.nullcontext():
        return run(job.spec, context)
