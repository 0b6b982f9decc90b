"""The emulated NPU's device layer: each body runs in a process of its own, once as is and once with a fault that it must catch.

One warm process imports torch and forks per body: importing torch_npu changes torch for good, so pytest's own process cannot.
"""

from __future__ import annotations

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
import torch

pytestmark = pytest.mark.stack

Plant = Callable[[], None]
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


def raises(kind: type[BaseException], text: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as fault:
        assert text in str(fault), fault
    else:
        raise AssertionError(f"no {kind.__name__}")


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


@caught_by(forgets(torch.nn.Module, "to"))
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


def garbage_buffers() -> None:
    """A layer whose empty_like cannot be told from real data: what from_pretrained gets for buffers that no file holds."""
    original = torch.arange
    torch.arange = lambda *a, **k: torch.zeros_like(original(*a, **k))  # type: ignore[assignment]


@caught_by(garbage_buffers)
def from_pretrained_is_unchanged() -> None:
    folder = Path(os.environ["TINY_MODEL"])
    expected = json.loads((folder / "expected.json").read_text())
    assert expected["inv_freq"][0] == 1.0
    assert tiny_model(folder) == expected
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    assert tiny_model(folder) == expected


@caught_by(forgets(torch, "load"))
def load_maps_to_the_device() -> None:
    data = io.BytesIO()
    torch.save({"x": torch.ones(2)}, data)
    for location in ("npu", "npu:0", torch.device("npu", 1), {"cpu": "npu:0"}, None):
        data.seek(0)
        assert torch.load(data, map_location=location)["x"].tolist() == [1.0, 1.0]


@caught_by(replaces(lambda: torch, "Generator", lambda device="cpu": None))
def generators_stay_classes() -> None:
    assert isinstance(torch.Generator, type)
    assert torch.Generator | None
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(1, torch.Generator)
    for device in ("npu", torch.device("npu:0"), "cpu"):
        generator = torch.Generator(device=device)
        assert isinstance(generator, torch.Generator)
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


@caught_by(replaces(lambda: sys.modules, "__class__", None) if False else lambda: sys.modules.update(mindspeed=sys))
def transfer_renames_for_megatron() -> None:
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    x = torch.ones(2)
    assert x.half().type() == "torch.cuda.HalfTensor"
    assert x.type() == "torch.cuda.FloatTensor"


@caught_by(lambda: None if sys.modules.pop("mindspeed", None) else replaces(lambda: sys, "modules", dict(sys.modules))())
def transfer_leaves_names_to_mindspeed() -> None:
    sys.modules["mindspeed"] = sys
    import torch_npu.contrib.transfer_to_npu  # noqa: F401

    assert torch.ones(2).type() == "torch.npu.FloatTensor"
