"""Probes: they count what ran, only while they look, and change nothing."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import threading
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from conformance.probes.calls import CallCounter  # noqa: E402
from conformance.probes.reads import ReadTrace  # noqa: E402
from conformance.probes.structure import config_facts, optimizer_facts, patched_facts  # noqa: E402
from conformance.probes.trace import DispatchTrace  # noqa: E402
from conformance.ranks import Job, RankServer  # noqa: E402

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer("probe_targets:preload_probes", env={"OMP_NUM_THREADS": "1"}) as server:
        server.start()
        yield server


def test_collectives_are_counted_by_group_and_kind(server: RankServer) -> None:
    report = server.run(Job("collectives", "probe_targets:trace_collectives", None, 2, 60))
    assert report.ok, report
    for rank in report.ranks:
        facts, values = rank.value  # type: ignore[misc]
        assert facts == {
            "collectives.tp.all_reduce": 3,
            "collectives.tp.all_gather": 2,
            "collectives.tp.reduce_scatter": 1,
            "collectives.tp.all_to_all": 1,
            "collectives.tp.broadcast": 1,
            "collectives.other.all_reduce": 1,
            f"collectives.other.{'send' if rank.rank == 0 else 'recv'}": 1,
            "collectives.tp.any": 8,
            "collectives.other.any": 2,
        }
        # 1 doubled by four reductions; the trace let every one of them through.
        assert values == {"gathered": 8 * 16.0, "scattered": 2 * 32.0}


def test_collectives_of_the_backward_pass_are_counted(server: RankServer) -> None:
    report = server.run(Job("backward", "probe_targets:trace_backward", None, 2, 60))
    assert report.ok, report
    assert [rank.value for rank in report.ranks] == [{"collectives.other.all_reduce": 1, "collectives.other.any": 1}] * 2


@pytest.fixture(scope="module")
def npu_twice() -> Iterator[Callable[[Any], Any]]:
    """An operator in the dispatcher's namespace `npu`: x -> 2x."""
    library = torch.library.Library("npu", "FRAGMENT")
    library.define("conformance_twice(Tensor x) -> Tensor")
    library.impl("conformance_twice", lambda x: 2 * x, "CompositeExplicitAutograd")
    yield torch.ops.npu.conformance_twice
    library._destroy()


def test_npu_operators_are_counted_while_entered(npu_twice: Callable[[Any], Any]) -> None:
    x = torch.ones(2)
    npu_twice(x)
    with DispatchTrace() as trace:
        assert npu_twice(npu_twice(x)).tolist() == [4.0, 4.0]
        torch.add(x, x)
    npu_twice(x)
    assert trace.facts({}) == {"ops.conformance_twice": 2}


# CallCounter


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of functions to count: two under one decorator, a static method, and one that is a builtin."""
    made = types.ModuleType("conformance_counted")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args)

        return wrapper

    @decorate
    def first(x: int) -> int:
        return x + 1

    @decorate
    def second(x: int) -> int:
        return x + 2

    def plain(x: int) -> int:
        return x

    class Function:
        @staticmethod
        def forward(x: int) -> int:
            return x

    made.__dict__.update(first=first, second=second, plain=plain, Function=Function, builtin=len)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def counted(names: list[str], run: Callable[[], Any]) -> dict[str, Any]:
    with CallCounter([f"conformance_counted:{name}" for name in names]) as counter:
        run()
    return {name.rpartition(":")[2]: count for name, count in counter.facts().items()}


def test_calls_are_counted_while_entered(module: types.ModuleType) -> None:
    module.plain(0)
    assert counted(["plain", "Function.forward"], lambda: [module.plain(i) for i in range(3)]) == {
        "plain": 3,
        "Function.forward": 0,
    }
    assert counted(["Function.forward"], lambda: module.Function.forward(1)) == {"Function.forward": 1}
    assert sys.getprofile() is None


def test_functions_under_one_decorator_are_told_apart(module: types.ModuleType) -> None:
    assert counted(["first"], lambda: module.second(1)) == {"first": 0}
    assert counted(["first", "second"], lambda: (module.first(1), module.first(1), module.second(1))) == {
        "first": 2,
        "second": 1,
    }


def test_a_function_reached_by_another_name_is_counted(module: types.ModuleType) -> None:
    alias = module.plain
    assert counted(["plain"], lambda: alias(1)) == {"plain": 1}


@pytest.mark.parametrize("target", ["nowhere", "Function.backward", "builtin"])
def test_what_does_not_exist_counts_none(module: types.ModuleType, target: str) -> None:
    assert counted([target], lambda: module.builtin([])) == {target: 0}


def test_module_that_does_not_exist_counts_none() -> None:
    with CallCounter(["no_such_module:f"]) as counter:
        pass
    assert counter.facts() == {"calls.no_such_module:f": 0}


def test_profile_ends_with_an_exception(module: types.ModuleType) -> None:
    def fail() -> None:
        module.plain(1)
        raise ZeroDivisionError

    counter = CallCounter(["conformance_counted:plain"])
    with pytest.raises(ZeroDivisionError), counter:
        fail()
    assert sys.getprofile() is None
    assert counter.facts() == {"calls.conformance_counted:plain": 1}


def layers_within_each_other() -> Any:
    """An autograd function of a tensor and a number, whose backward makes so many more backward passes, one in the other.

    Beyond 60 autograd goes on in a thread of its pool: no Python code starts it, as none starts those of a device.
    """

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any, left: int) -> Any:
            context.left = left
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            if context.left:
                with torch.enable_grad():
                    Layer.apply(torch.ones(1, requires_grad=True), context.left - 1).backward()
            return gradient * 2, None

    return Layer


@pytest.mark.parametrize("follow", [True, False])
def test_calls_are_counted_in_autograd_s_threads(follow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `watch_thread`, the planted fault, those that run in other threads are missing."""
    depth = 80
    made = types.ModuleType("conformance_counted")
    made.__dict__["Layer"] = layers_within_each_other()
    monkeypatch.setitem(sys.modules, made.__name__, made)
    counter = CallCounter(["conformance_counted:Layer.forward", "conformance_counted:Layer.backward"])
    output = made.Layer.apply(torch.ones(1, requires_grad=True), depth)
    with DispatchTrace(counter.watch_thread) if follow else DispatchTrace(), counter:
        output.backward()
    counts = {name.rpartition(".")[2]: count for name, count in counter.facts().items()}
    if follow:
        assert counts == {"forward": depth, "backward": depth + 1}
    else:
        assert max(counts.values()) < depth
    # The threads live on in autograd's pool: they stop counting by themselves.
    again = made.Layer.apply(torch.ones(1, requires_grad=True), depth)
    again.backward()
    with DispatchTrace():
        made.Layer.apply(torch.ones(1, requires_grad=True), depth).backward()
    assert {name.rpartition(".")[2]: count for name, count in counter.facts().items()} == counts


def test_a_profile_function_of_an_earlier_step_goes_when_its_thread_next_runs(module: types.ModuleType) -> None:
    def in_thread(say: Callable[[], object], then: threading.Event, go: threading.Event) -> None:
        say()
        then.set()
        go.wait()
        module.plain(0)
        left.append(sys.getprofile())

    left: list[Any] = []
    then, go = threading.Event(), threading.Event()
    with CallCounter(["conformance_counted:plain"]) as counter:
        thread = threading.Thread(target=in_thread, args=(counter.watch_thread, then, go))
        thread.start()
        then.wait()
    go.set()
    thread.join()
    assert left == [None]
    assert counter.facts() == {"calls.conformance_counted:plain": 0}


# ReadTrace


def reader(module: str) -> Callable[[Any, str], Any]:
    """A function of that module which reads an attribute that its text names."""
    scope: dict[str, Any] = {"__name__": module}
    choices = "".join(f"    if name == {name!r}: return instance.{name}\n" for name in ("key", "other", "missing"))
    source = f"def read(instance, name):\n{choices}"
    exec(compile(source, "reader.py", "exec"), scope)
    return scope["read"]  # type: ignore[no-any-return]


STACK = reader("megatron.core.transformer.attention")


@dataclasses.dataclass
class Config:
    key: int = 7
    other: int = 8

    @property
    def doubled(self) -> int:
        return 2 * self.key


class SubConfig(Config):
    pass


@pytest.fixture
def classes() -> tuple[type, type]:
    """A config class and its subclass, new to each test, since observing a class stays."""
    base = type("Base", (Config,), {})
    return base, type("Sub", (base,), {})


def test_reads_of_named_keys_from_the_stack_are_counted(classes: tuple[type, type]) -> None:
    base, _sub = classes
    old = base()
    trace = ReadTrace(["key"])
    trace.attach_class(base)
    new = base()
    assert [STACK(old, "key"), STACK(new, "key"), STACK(new, "other")] == [7, 7, 8]
    assert trace.facts() == {"reads.key": 2}
    assert trace.readers() == {"key": ["megatron.core.transformer.attention:read"]}


@pytest.mark.parametrize("module", ["megatron.core.a", "mindspeed.a", "verl.workers.a", "mbridge.a"])
def test_readers_that_count(classes: tuple[type, type], module: str) -> None:
    trace = ReadTrace(["key"])
    trace.attach_class(classes[0])
    reader(module)(classes[0](), "key")
    assert trace.facts() == {"reads.key": 1}


@pytest.mark.parametrize("module", ["dataclasses", "copy", "conformance.step", "torch.nn", "megatronic", "__main__"])
def test_readers_that_do_not_count(classes: tuple[type, type], module: str) -> None:
    trace = ReadTrace(["key"])
    trace.attach_class(classes[0])
    assert reader(module)(classes[0](), "key") == 7
    assert trace.facts() == {"reads.key": 0}
    assert trace.readers() == {}


def test_reading_whatever_there_is_does_not_count_but_a_feature_s_own_key_does(classes: tuple[type, type]) -> None:
    scope: dict[str, Any] = {"__name__": "mindspeed.features"}
    source = "def copy(instance, names):\n    return [getattr(instance, name) for name in names]\n"
    source += "def is_need_apply(self, instance):\n    return getattr(instance, self.feature_name)"
    exec(compile(source, "features.py", "exec"), scope)
    trace = ReadTrace(["key"])
    trace.attach_class(classes[0])
    assert scope["copy"](classes[0](), ["key", "other"]) == [7, 8]
    assert trace.facts() == {"reads.key": 0}
    assert scope["is_need_apply"](Namespace(feature_name="key"), classes[0]()) == 7
    assert trace.facts() == {"reads.key": 1}


def test_plumbing_does_not_count(classes: tuple[type, type]) -> None:
    base, _sub = classes
    made = dataclasses.make_dataclass("Made", [("key", int)], bases=(), namespace={"__module__": "megatron.core"})
    for cls, instance in ((base, base()), (made, made(3))):
        trace = ReadTrace(["key"])
        trace.attach_class(cls)
        assert repr(instance)
        assert instance == copy.deepcopy(instance)
        dataclasses.replace(instance)
        assert dataclasses.asdict(instance)["key"] in (3, 7)
        vars(instance)
        assert trace.facts() == {"reads.key": 0}


def test_subclass_instances_are_observed(classes: tuple[type, type]) -> None:
    base, sub = classes
    trace = ReadTrace(["key"])
    trace.attach_class(base)
    assert STACK(sub(), "key") == 7
    assert trace.facts() == {"reads.key": 1}


def test_values_errors_and_defaults_pass_through(classes: tuple[type, type]) -> None:
    base, _sub = classes
    trace = ReadTrace(["key", "missing"])
    trace.attach_class(base)
    instance = base()
    marker = instance.key = object()
    assert STACK(instance, "key") is marker
    with pytest.raises(AttributeError, match="missing"):
        STACK(instance, "missing")
    assert getattr(instance, "missing", 5) == 5
    assert trace.facts() == {"reads.key": 1, "reads.missing": 1}


def test_one_instance_alone_can_be_observed() -> None:
    observed, other = Namespace(key=1), Namespace(key=1)
    trace = ReadTrace(["key"])
    trace.attach_instance(observed)
    assert (STACK(observed, "key"), STACK(other, "key")) == (1, 1)
    assert trace.facts() == {"reads.key": 1}
    assert isinstance(observed, Namespace)
    assert type(observed).__name__ == "Namespace"
    observed.key = 2
    assert STACK(observed, "key") == 2
    assert vars(observed) == {"key": 2}


def test_nothing_is_observed_without_keys(classes: tuple[type, type]) -> None:
    base, _sub = classes
    ReadTrace([]).attach_class(base)
    assert "__getattribute__" not in vars(base)


# Structure


def adam(parameters: int, elements: int, steps: int = 1) -> Any:
    weights = [torch.nn.Parameter(torch.ones(elements)) for _ in range(parameters)]
    optimizer = torch.optim.Adam(weights)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.ones(elements)
        optimizer.step()
    return optimizer


def test_optimizer_facts_count_what_adam_keeps() -> None:
    facts = optimizer_facts(adam(2, 10))
    assert facts == {
        "optimizer.class": "torch.optim.adam.Adam",
        "optimizer.shard_elements": 20,
        "storage.exp_avg_bytes": 80,
    }


def test_optimizer_facts_of_an_optimizer_that_has_not_stepped() -> None:
    facts = optimizer_facts(adam(2, 10, steps=0))
    assert (facts["optimizer.shard_elements"], facts["storage.exp_avg_bytes"]) == (0, 0)


def test_optimizer_facts_add_up_over_a_chain_of_wrapped_optimizers() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    chain = types.SimpleNamespace(chained_optimizers=[Wrapper(adam(1, 10)), Wrapper(adam(1, 5))])
    facts = optimizer_facts(chain)
    assert facts["optimizer.shard_elements"] == 15
    assert facts["storage.exp_avg_bytes"] == 60
    assert str(facts["optimizer.class"]).endswith("Wrapper")


def test_a_state_that_was_swapped_out_holds_no_bytes() -> None:
    optimizer = adam(2, 10)
    first = next(iter(optimizer.state.values()))
    first["exp_avg"].untyped_storage().resize_(0)
    facts = optimizer_facts(optimizer)
    assert facts["optimizer.shard_elements"] == 20
    assert facts["storage.exp_avg_bytes"] == 40


def test_config_facts_are_numbers_or_text() -> None:
    config = types.SimpleNamespace(flag=True, size=3, eps=1e-6, kind=torch.float32, nothing=None)
    assert config_facts(config, ["flag", "size", "eps", "kind", "nothing", "absent"]) == {
        "config.flag": 1.0,
        "config.size": 3,
        "config.eps": 1e-6,
        "config.kind": "torch.float32",
        "config.nothing": "None",
        "config.absent": "None",
    }


def test_patched_facts_tell_what_the_name_refers_to(module: types.ModuleType) -> None:
    """Two functions of one file are told apart, and a wrapper from what it wraps, whose names it has taken on."""
    name = "patched.conformance_counted:"
    first = patched_facts(["conformance_counted:plain"])[f"{name}plain"]
    assert first == "test_probes.py:module.<locals>.plain"

    @functools.wraps(module.plain)
    def wrapper(x: int) -> int:
        return int(module.plain(x))

    module.__dict__["plain"] = wrapper
    assert str(patched_facts(["conformance_counted:plain"])[f"{name}plain"]).endswith("<locals>.wrapper")
    assert patched_facts(["conformance_counted:builtin"]) == {f"{name}builtin": "builtins:len"}
    assert patched_facts(["conformance_counted:Function"])[f"{name}Function"] == f"{__name__}:module.<locals>.Function"
