"""Runs in ranks: the families' named cases, which operators they call, and what the vendor's meta registrations say of each call.

A wheel's registrations are Python and need of CANN only what the stand-ins here give. Their text stays in the wheel.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from conformance import npu
from conformance.npu.vendor import member
from conformance.operators import COLLECTIVE
from conformance.operators.catalogue import CATALOGUE
from conformance.operators.surface import active
from conformance.ranks import RankContext

METAS = "torch_npu/op_plugin/meta/_meta_registrations.py"
ERRORS = "torch_npu/utils/_error_code.py"

_ASCEND_910B = 220  # what torch_npu calls it

Meta = Callable[..., Any]
#: What an output is: a tensor's shape and dtype, else a type's name.
Output = tuple[tuple[int, ...], str] | str


@dataclass(frozen=True)
class Call:
    """One call of an operator, arguments on the meta device, and what the emulation returned."""

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Differing:
    """Outputs by the vendor, or what its registration raised, and the emulation's."""

    op: str
    theirs: tuple[Output, ...] | str
    ours: tuple[Output, ...]


@dataclass
class Confirmed:
    """Of one wheel: operator -> calls that agree; those that do not; operators without a registration."""

    agreeing: Counter[str] = field(default_factory=Counter)
    differing: list[Differing] = field(default_factory=list)
    unregistered: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Found:
    """`families`: operator -> the families that call it. `confirmed`: the wheel's label -> what came of it."""

    families: dict[str, set[str]]
    confirmed: dict[str, Confirmed]


def preload(_: object) -> None:
    """The emulation, also where there is an NPU: it is what is looked at."""
    npu.activate("emulated", mindspeed=False)
    torch.set_num_threads(1)


def run(wheels: dict[str, Path], context: RankContext) -> Found | None:
    """On rank 0: every call of the named cases (but the long ones), held against each wheel. The others only take part."""
    dist.init_process_group("hccl", init_method=context.rendezvous, rank=context.rank, world_size=context.world_size)
    families, calls = defaultdict(set), []
    for family, call in _calls(context):
        families[call.op].add(family)
        calls.append(call)
    if context.rank:
        return None
    calls += _other_calls()
    return Found(dict(families), {label: confirm(registrations(path), calls) for label, path in wheels.items()})


def confirm(metas: Mapping[str, Meta], calls: list[Call]) -> Confirmed:
    """Run the registration of each call's operator on the same arguments and compare outputs."""
    found = Confirmed()
    for call in calls:
        if call.op not in metas:
            found.unregistered.add(call.op)
            continue
        try:
            said = described(metas[call.op](*call.args, **call.kwargs))
        except Exception as fault:
            found.differing.append(Differing(call.op, f"{type(fault).__name__}: {fault}", call.outputs))
            continue
        if len(said) == len(call.outputs) and all(map(_same, said, call.outputs)):
            found.agreeing[call.op] += 1
        else:
            found.differing.append(Differing(call.op, said, call.outputs))
    return found


def described(result: Any) -> tuple[Output, ...]:
    """Outputs in order."""
    outputs = result if isinstance(result, tuple | list) else (result,)
    return tuple((tuple(o.shape), str(o.dtype)) if isinstance(o, Tensor) else type(o).__name__ for o in outputs)


def _same(theirs: Output, ours: Output) -> bool:
    """An output that is not there is None or an empty tensor of one dimension, by the vendor and here."""
    return theirs == ours or all(output == "NoneType" or output[0] == (0,) for output in (theirs, ours))


def registrations(wheel: Path) -> dict[str, Meta]:
    """Operator -> the wheel's meta function, by running its file with a `torch.library` that only takes notes."""
    source = member(wheel, METAS).decode()
    found: dict[str, Meta] = {}

    class Library:
        def __init__(self, namespace: str, _kind: str, _key: str = "") -> None:
            self.namespace = namespace

    def impl(library: Library, name: str, _key: str = "") -> Callable[[Meta], Meta]:
        def note(function: Meta) -> Meta:
            if library.namespace == "npu":
                found[name] = function
            return function

        return note

    with (
        _named_operators(source),
        _stand_ins(wheel),
        mock.patch("torch.library.Library", Library),
        mock.patch("torch.library.impl", impl),
    ):
        exec(compile(source, METAS, "exec"), {"__name__": "vendor_metas"})
    return found


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "npu":
            return func(*args, **(kwargs or {}))
        on_meta = tree_map(_to_meta, (args, kwargs or {}))  # before an operator writes into them
        result = func(*args, **(kwargs or {}))
        self.calls.append(Call(str(func).removeprefix("npu.").removesuffix(".default"), *on_meta, described(result)))
        return result


def _to_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _calls(context: RankContext) -> Iterator[tuple[str, Call]]:
    surface = active(context.rank)
    world: Any = dist.group.WORLD
    named = world._get_backend(torch.device("npu")).get_hccl_comm_name(context.rank)
    for family, entry in CATALOGUE.items():
        for name, case in entry.named.items():
            if "long" in name or (context.rank and family not in COLLECTIVE):
                continue
            with _Recorder() as recorder:
                if family in COLLECTIVE:
                    entry.check(case, replace(surface, communicator=named), context.rank, context.world_size)
                else:
                    entry.check(case, surface)
            yield from ((family, call) for call in recorder.calls)


def _other_calls() -> list[Call]:
    """Operators that no family calls."""
    ops, x = torch.ops.npu, torch.randn(2, 3, 32, 64)
    hidden = torch.zeros(2, 1, 32, 64, dtype=torch.bool)
    with _Recorder() as recorder:
        ops.npu_scaled_masked_softmax_backward(x, ops.npu_scaled_masked_softmax(x, hidden, 2.0, False), hidden, 2.0, False)
        for number in (5, 6, 15):  # float16, float32, bfloat16
            ops.npu_dtype_cast(x, number)
        ops.npu_dtype_cast_backward(x.bfloat16(), torch.float32)
        ops.npu_format_cast(x, 2)
        ops.get_npu_format(x)
        ops.empty_with_swapped_memory([2, 3], dtype=torch.float32, device=torch.device("npu"))
    return recorder.calls


@contextmanager
def _named_operators(source: str) -> Iterator[None]:
    """Let the file name operators that the emulation lacks: it marks some as having side effects."""
    with torch.library._scoped_library("npu", "FRAGMENT") as library:
        for name, overload in sorted(set(re.findall(r"torch\.ops\.npu\.(\w+)\.(\w+)", source))):
            if not hasattr(getattr(torch.ops.npu, name, None), overload):
                library.define(f"{name}{'' if overload == 'default' else '.' + overload}() -> ()")
        yield


@contextmanager
def _stand_ins(wheel: Path) -> Iterator[None]:
    """torch_npu's modules that the file imports. The chip is an Ascend 910B; what asks for CANN raises: it is not known here."""

    def unknown(*_: Any) -> Any:
        raise NotImplementedError("not known without CANN")

    # Numbers that stand for dtypes which torch has not.
    dtypes = {"hifloat8": 290, "float8_e8m0fnu": 293, "float4_e2m1fn_x2": 296, "float4_e1m2fn_x2": 297}
    contents: dict[str, dict[str, Any]] = {
        "torch_npu": dtypes,
        "torch_npu.npu": {},
        "torch_npu.npu.utils": {"get_cann_version": unknown, "_is_gte_cann_version": unknown},
        "torch_npu.npu._backends": {"get_soc_version": lambda: _ASCEND_910B},
        "torch_npu.utils": {},
        "torch_npu.utils.utils": {"_is_interactive_command_line": lambda: False},
        "torch_npu.utils._error_code": {},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    with mock.patch.dict(sys.modules, modules):
        errors = modules["torch_npu.utils._error_code"]
        exec(compile(member(wheel, ERRORS).decode(), ERRORS, "exec"), vars(errors))
        yield
