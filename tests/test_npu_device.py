"""The emulated NPU's device layer: each body runs in a process of its own, once as is and once with a fault that it must catch.

One warm process imports torch and forks per body: importing torch_npu changes torch for good, so pytest's own process cannot.
"""
# ruff: noqa: ARG004, ARG005 - faults and autograd functions ignore arguments

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.stack

torch: Any = pytest.importorskip("torch")

Plant = Callable[[], object]
BODIES: dict[str, tuple[Callable[[], None], Plant, bool]] = {}
ROOT = Path(__file__).resolve().parents[1]


def caught_by(plant: Plant, *, before_import: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a body with the fault that must make it fail."""

    def register(body: Callable[[], None]) -> Callable[[], None]:
        BODIES[body.__name__] = (body, plant, before_import)
        return body

    return register


def forgets(owner: Any, name: str) -> Plant:
    """A device layer that did not wrap `owner.name`."""
    return lambda: setattr(owner, name, getattr(owner, name).__wrapped__)


def replaces(owner: Callable[[], Any], name: str, value: Any) -> Plant:
    """A device layer in which `name` does something else."""
    return lambda: setattr(owner(), name, value)


def emulation() -> Any:
    import torch_npu

    return torch_npu


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as raised:
        said = str(raised)
    else:
        raise AssertionError(f"nothing raised, want {kind}")
    assert text in said, said


def devices() -> list[Any]:
    return ["npu", "npu:0", "npu:3", torch.device("npu"), torch.device("npu", 1), 0, torch.npu.current_device()]


@caught_by(forgets(torch, "zeros"))
def factories_take_every_form() -> None:
    for device in devices():
        for made in (
            torch.zeros(2, device=device), torch.empty((2, 3), device=device), torch.full((2,), 1.0, device=device),
            torch.tensor([1.0], device=device), torch.arange(3, device=device), torch.rand(2, device=device),
            torch.as_tensor([1, 2], device=device), torch.zeros_like(torch.ones(2), device=device),
            torch.eye(2, device=device), torch.randperm(4, device=device), torch.empty_strided((2,), (1,), device=device),
        ):  # fmt: skip
            assert made.device.type == "cpu"
            assert made.is_npu


@caught_by(forgets(torch.Tensor, "new_zeros"))
def new_methods_take_every_form() -> None:
    x = torch.ones(2)
    for device in devices():
        for made in (
            x.new_zeros(3, device=device), x.new_empty(3, device=device), x.new_ones(3, device=device),
            x.new_full((3,), 2.0, device=device), x.new_tensor([1.0], device=device),
        ):  # fmt: skip
            assert made.device.type == "cpu"
    assert x.new_zeros(3).dtype is torch.float32


@caught_by(forgets(torch.Tensor, "to"))
def tensor_to_takes_every_form() -> None:
    x = torch.ones(2)
    for device in devices():
        assert x.to(device) is x
        assert x.to(device=device) is x
        assert x.to(device, torch.bfloat16).dtype is torch.bfloat16
        assert x.to(device, torch.bfloat16, True).dtype is torch.bfloat16
        assert x.to(device=device, dtype=torch.float16, non_blocking=True).dtype is torch.float16
        assert x.to(device, copy=True) is not x
    assert x.to(torch.ones(1, dtype=torch.float64)).dtype is torch.float64
    assert x.to(torch.int32, True).dtype is torch.int32
    assert x.npu() is x
    assert x.npu("npu:0", non_blocking=True) is x
    x.record_stream(torch.npu.current_stream())


@caught_by(replaces(lambda: torch.Tensor, "cpu", lambda self: self))
def copies_to_the_host_share_no_storage() -> None:
    x = torch.ones(2)
    copies = [x.cpu(), x.to("cpu"), x.to("cpu", non_blocking=True), x.pin_memory()]
    x.untyped_storage().resize_(0)
    assert all(copy.tolist() == [1.0, 1.0] for copy in copies)


@caught_by(forgets(torch.Tensor, "to"))
def modules_move_in_every_form() -> None:
    for device in devices():
        module = torch.nn.Linear(2, 2)
        weight = module.weight
        assert module.to(device) is module
        assert module.to(device=device) is module
        assert module.npu() is module
        assert module.weight is weight
        assert module.to(device, torch.bfloat16).weight.dtype is torch.bfloat16
    meta = torch.nn.Linear(2, 2, device="meta")
    raises(NotImplementedError, "meta tensor", lambda: meta.to("npu"))
    raises(NotImplementedError, "meta tensor", lambda: meta.weight.npu())
    assert meta.to_empty(device="npu").weight.device.type == "cpu"
    assert torch.nn.Linear(2, 2, device="npu", dtype=torch.float16).weight.dtype is torch.float16


@caught_by(forgets(torch, "empty"))
def pinned_memory_is_plain_memory() -> None:
    assert not torch.empty(2, pin_memory=True).is_pinned()
    assert torch.zeros(2, pin_memory=True, device="cpu").tolist() == [0.0, 0.0]
    assert torch.empty_like(torch.ones(2), pin_memory=True).shape == (2,)
    assert torch.ones(2).new_empty(2, pin_memory=True).shape == (2,)


def remember_wrapped_constructors() -> None:
    """A layer that wraps before torch has listed its constructors: `with torch.device("meta")` then misses the originals."""
    from torch.utils import _device

    _device._device_constructors.cache_clear()


@caught_by(remember_wrapped_constructors)
def default_devices_hold() -> None:
    with torch.device("meta"):
        assert torch.ones(2).is_meta
        assert torch.arange(3).is_meta
        assert torch.ones(2, device="npu").device.type == "cpu"
    with torch.device("npu"):
        assert torch.ones(2).device.type == "cpu"
    torch.set_default_device("npu:1")
    assert torch.zeros(2).device.type == "cpu"
    torch.set_default_device(None)


def tiny_model(folder: Path) -> dict[str, Any]:
    """(inverse frequencies, logits) of the checkpoint in `folder`, which from_pretrained builds on the meta device."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(8)[None]).logits
    return {"inv_freq": model.model.rotary_emb.inv_freq.tolist(), "logits": logits.tolist()}


@caught_by(remember_wrapped_constructors)
def from_pretrained_is_unchanged() -> None:
    folder = Path(os.environ["TINY_MODEL"])
    expected = json.loads((folder / "expected.json").read_text())
    assert expected["inv_freq"][0] == 1.0
    assert tiny_model(folder) == expected
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    assert tiny_model(folder) == expected


@caught_by(forgets(torch.UntypedStorage, "to"))
def storages_move() -> None:
    """Unwrapped, it kills the process."""
    storage = torch.ones(2).untyped_storage()
    assert storage.to(device="npu:0").device.type == "cpu"
    assert storage.to(device=torch.device("npu")).tolist() == storage.tolist()


@caught_by(lambda: (forgets(torch, "load")(), forgets(torch.UntypedStorage, "to")()))
def load_maps_to_the_device() -> None:
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    data = io.BytesIO()
    torch.save({"x": torch.ones(2)}, data)
    for location in ("npu", "npu:0", torch.device("npu", 1), {"cpu": "npu:0"}, None, "cuda:0", {"cpu": "cuda:0"}):
        data.seek(0)
        loaded = torch.load(data, map_location=location)["x"]
        assert loaded.device.type == "cpu"
        assert loaded.tolist() == [1.0, 1.0]


@caught_by(replaces(lambda: torch, "Generator", lambda device="cpu": None))
def generators_stay_classes() -> None:
    assert isinstance(torch.Generator, type)
    assert torch.Generator | None
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(1, torch.Generator)
    for device in ("npu", torch.device("npu:0"), "cpu"):
        assert isinstance(torch.Generator(device=device), torch.Generator)
        generator = torch.Generator(device=device)
        assert torch.rand(2, generator=generator.manual_seed(3)).tolist() == (
            torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist()
        )


@caught_by(lambda: setattr(torch.npu, "set_rng_state", lambda state, device=None: None))
def there_is_one_random_state() -> None:
    torch.npu.manual_seed(5)
    state = torch.npu.get_rng_state()
    first = torch.rand(3, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.npu.default_generators[torch.npu.current_device()].manual_seed(5)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(5)
    assert torch.equal(torch.npu.get_rng_state("npu:0"), state)


@caught_by(forgets(torch.Tensor, "type"))
def type_names_are_the_npus() -> None:
    x = torch.ones(2)
    assert x.type() == "torch.npu.FloatTensor"
    assert x.bfloat16().type() == "torch.npu.BFloat16Tensor"
    assert x.type("torch.npu.HalfTensor").dtype is torch.float16
    assert x.type(torch.npu.DoubleTensor).dtype is torch.float64
    assert x.type(torch.int32).dtype is torch.int32
    assert isinstance(x, torch.npu.FloatTensor)
    assert not isinstance(x, torch.npu.HalfTensor)


@caught_by(lambda: sys.modules.update(mindspeed=sys))
def transfer_renames_types_for_megatron() -> None:
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).half().type() == "torch.cuda.HalfTensor"


@caught_by(lambda: emulation()._device.type_prefix.__setitem__(0, "torch.cuda."))
def transfer_leaves_types_to_mindspeed() -> None:
    sys.modules["mindspeed"] = sys
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    assert torch.ones(2).type() == "torch.npu.FloatTensor"


@caught_by(lambda: emulation().npu.__all__.remove("get_device_capability"))
def transfer_sends_cuda_to_the_npu() -> None:
    raises((RuntimeError, AssertionError), "", lambda: torch.zeros(2, device="cuda"))
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    x = torch.zeros(2, device="cuda:0")
    assert x.is_cuda
    assert x.cuda() is x
    assert x.to("cuda") is x
    assert torch.nn.Linear(2, 2).cuda(torch.cuda.current_device()).weight.is_cuda
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == torch.npu.device_count()
    assert torch.cuda.get_device_capability(x.device)[0] == 8
    assert torch.cuda.default_generators[0] is torch.default_generator
    assert torch.equal(torch.cuda.random.get_rng_state(), torch.get_rng_state())
    assert torch.cuda.current_stream() is torch.npu.current_stream()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


@caught_by(replaces(lambda: emulation()._device, "require_index", lambda index, lowest=0: None))
def a_device_that_is_not_there_is_refused() -> None:
    x = torch.zeros(2, device=f"npu:{torch.npu.device_count() - 1}")
    for call in (
        lambda: torch.zeros(2, device="npu:77"),
        lambda: torch.zeros(2, device=torch.device("npu", 77)),
        lambda: torch.ones_like(x, device=77),
        lambda: x.to("npu:77"),
        lambda: x.to(77),
        lambda: x.new_zeros(2, device="npu:77"),
        lambda: torch.nn.Linear(2, 2).to("npu:77"),
    ):
        raises(RuntimeError, "Invalid device ID 77: the emulated NPU has 8 devices", call)


def takes_anything() -> None:
    c10d = emulation()._C._distributed_c10d
    c10d.ProcessGroupHCCL.Options = type("Options", (c10d._Options,), {})  # without slots of its own it has a dict


@caught_by(takes_anything)
def options_have_the_vendors_fields_only() -> None:
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    for field in ("hccl_config", "is_high_priority_stream", "global_ranks_in_group", "group_id", "op_timeout", "_timeout"):
        setattr(options, field, getattr(options, field))
    assert hasattr(ProcessGroupHCCL.Options, "hccl_config")

    def make_one_up() -> None:
        options.made_up = 3

    raises(AttributeError, "made_up", make_one_up)


@caught_by(lambda: setattr(torch.npu, "set_device", lambda device: None))
def device_module_knows_its_devices() -> None:
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 8
    assert type(torch.npu.current_device()) is int
    torch.npu.set_device("npu:2")
    assert torch.npu.current_device() == 2
    with torch.npu.device(1):
        assert torch.npu.current_device() == 1
    assert torch.npu.current_device() == 2
    raises(RuntimeError, "99", lambda: torch.npu.set_device(99))
    assert "emulated" in torch.npu.get_device_name()
    assert torch.npu.get_device_properties(0).total_memory == torch.npu.mem_get_info()[1]
    assert torch.npu.memory_allocated() == torch.npu.max_memory_reserved() == 0
    assert torch.npu.is_bf16_supported()
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    called: list[int] = []
    torch.npu._lazy_call(lambda: called.append(1))
    assert called == [1]


@caught_by(lambda: setattr(torch.npu, "stream", lambda stream: __import__("contextlib").nullcontext()))
def streams_nest_and_events_time() -> None:
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        assert torch.npu.current_stream() is side
    assert torch.npu.current_stream() is torch.npu.default_stream()
    first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    first.record()
    last.record(side)
    last.synchronize()
    assert 0 <= first.elapsed_time(last) < 1000
    raises(RuntimeError, "enable_timing", lambda: torch.npu.Event().elapsed_time(last))


@caught_by(lambda: setattr(emulation(), "__getattr__", lambda name: None))
def unknown_names_are_named() -> None:
    npu = emulation()
    for module in (npu, npu.npu, npu.profiler, npu.utils, npu._C):
        assert not hasattr(module, "npu_no_such")
        raises(AttributeError, "npu_no_such", functools.partial(getattr, module, "npu_no_such"))
    raises(AttributeError, "emulated NPU does not implement", lambda: npu.npu_no_such)
    raises(NotImplementedError, "profile", npu.profiler.profile)


@caught_by(lambda: delattr(emulation(), "npu_rms_norm"))
def operators_are_attributes() -> None:
    npu = emulation()
    assert Path(npu.__file__).name == "__init__.py"
    assert npu.npu_rms_norm is torch.ops.npu.npu_rms_norm
    assert set(npu.ops.EXPORTS) <= set(vars(npu))
    assert not hasattr(npu, "npu_cross_entropy_loss")  # verl would use it


@caught_by(lambda: setattr(torch.autocast, "__init__", torch.autocast.__init__.__wrapped__))
def autocast_is_the_cpus() -> None:
    two = torch.ones(2, 2)
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (two @ two).dtype is torch.bfloat16
        assert torch.is_autocast_enabled("npu")
    with torch.npu.amp.autocast():
        assert (two @ two).dtype is torch.float16
    assert (two @ two).dtype is torch.float32


@caught_by(forgets(torch, "ones"))
def backward_is_redirected_too() -> None:
    """What runs inside `Tensor.backward()` escapes a TorchFunctionMode."""

    class Double(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.to("npu") * torch.ones(2, device="npu") * 2

    x = torch.zeros(2, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def on_two_ranks(backend: str, work: Callable[[int], None]) -> None:
    """Run `work(rank)` on two forked ranks; the first failure's traceback is printed, and raises here."""
    folder = tempfile.mkdtemp()
    children = []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=2)
                work(rank)
                torch.distributed.destroy_process_group()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]


def no_hooks() -> None:
    """A layer that does not tell torch of its accelerator."""
    torch._C._acc.register_python_privateuseone_hook = lambda hook: None
    torch._C._acc.register_python_privateuseone_device_guard = lambda guard: None


@caught_by(no_hooks, before_import=True)
def barrier_and_all_reduce_over_two_backends() -> None:
    def work(rank: int) -> None:
        torch.distributed.barrier()
        x = torch.full((3,), float(rank + 1), device="npu")
        torch.distributed.all_reduce(x)
        assert x.tolist() == [3.0] * 3

    on_two_ranks("cpu:gloo,npu:hccl", work)


@caught_by(lambda: setattr(torch.distributed, "all_gather", torch.distributed.all_gather.__wrapped__))
def unlike_sizes_are_gathered_and_scattered() -> None:
    def work(rank: int) -> None:
        sizes = (1, 3)
        gathered = [torch.empty(size) for size in sizes]
        torch.distributed.all_gather(gathered, torch.full((sizes[rank],), float(rank)))
        assert [g.tolist() for g in gathered] == [[0.0], [1.0] * 3]
        out = torch.empty(sizes[rank])
        torch.distributed.reduce_scatter(out, [torch.full((size,), rank + 1.0) for size in sizes])
        assert out.tolist() == [3.0] * sizes[rank]

    on_two_ranks("cpu:gloo,npu:hccl", work)


@caught_by(lambda: setattr(emulation()._groups, "group_of", lambda name: torch.distributed.group.WORLD))
def communicators_are_found_by_name() -> None:
    def work(rank: int) -> None:
        alone = [torch.distributed.new_group([r]) for r in (0, 1)][rank]
        device = torch.device("npu")
        groups = [g._get_backend(device) for g in (torch.distributed.group.WORLD, alone)]
        names = [g.get_hccl_comm_name(rank) for g in groups]
        assert names[0] != names[1]
        assert names == [g.get_hccl_comm_name(rank) for g in groups]
        group_of = emulation()._groups.group_of
        assert [group_of(n) for n in names] == groups
        assert [group_of(n).size() for n in names] == [2, 1]
        raises(ValueError, "global rank", lambda: groups[0].get_hccl_comm_name(1 - rank))
        raises(RuntimeError, "no_such", lambda: group_of("no_such"))
        out = torch.empty(4)
        group_of(names[0])._allgather_base(out, torch.full((2,), float(rank))).wait()
        assert out.tolist() == [0.0, 0.0, 1.0, 1.0]

    on_two_ranks("hccl", work)


@caught_by(lambda: delattr(emulation()._C._distributed_c10d.ProcessGroupHCCL, "Options"))
def transfer_takes_nccl_for_hccl() -> None:
    import torch_npu.contrib.transfer_to_npu  # noqa: F401
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    def work(rank: int) -> None:
        options = ProcessGroupHCCL.Options()
        options.hccl_config = {"hccl_buffer_size": 200}
        group = torch.distributed.new_group([0, 1], backend="nccl", pg_options=options)
        x = torch.ones(1, device="cuda")
        torch.distributed.all_reduce(x, group=group)
        torch.distributed.barrier(group)
        assert x.item() == 2.0
        assert isinstance(group._get_backend(torch.device("npu")), ProcessGroupHCCL)
        assert rank == torch.distributed.get_rank(group)

    on_two_ranks("cpu:gloo,cuda:nccl", work)


# The warm process. ---------------------------------------------------------------------------------------------------


def attempt(name: str, *, faulty: bool) -> str:
    """Run a body in a fork of this process; its traceback, empty when it passed."""
    body, plant, before_import = BODIES[name]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            if faulty and before_import:
                plant()
            emulation()
            if faulty and not before_import:
                plant()
            body()
        except BaseException:
            text = traceback.format_exc()[:4000]
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return text if code == 0 else f"Traceback: the process died with {code}\n{text}"


def serve(folder: Path) -> None:
    """Make the tiny checkpoint without the device layer, then run every body twice."""
    if (model := os.fork()) == 0:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
        torch.manual_seed(0)
        config = Qwen3Config(**shape, num_attention_heads=4, num_key_value_heads=2)
        Qwen3ForCausalLM(config).save_pretrained(folder)
        (folder / "expected.json").write_text(json.dumps(tiny_model(folder)))
        os._exit(0)
    os.waitpid(model, 0)
    os.environ["TINY_MODEL"] = str(folder)
    sys.path.insert(0, str(ROOT / "conformance" / "npu" / "site"))
    found = {name: [attempt(name, faulty=faulty) for faulty in (False, True)] for name in BODIES}
    (folder / "attempts.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Body name -> tracebacks (as is, with the fault)."""
    folder = tmp_path_factory.mktemp("npu")
    code = f"import sys, pathlib, test_npu_device as t; t.serve(pathlib.Path({str(folder)!r}))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads((folder / "attempts.json").read_text())
    return found


@pytest.mark.parametrize("body", BODIES)
def test_body_passes(attempts: dict[str, list[str]], body: str) -> None:
    assert attempts[body][0] == ""


@pytest.mark.parametrize("body", BODIES)
def test_body_catches_its_fault(attempts: dict[str, list[str]], body: str) -> None:
    assert attempts[body][1].startswith("Traceback")
