"""Device arguments: whatever names an NPU (or, after transfer_to_npu, a GPU) is computed on the CPU.

Stands for the PrivateUse1 device that torch_npu's C++ extension registers. Every function that takes a device is wrapped, as
transfer_to_npu wraps them; a TorchFunctionMode would miss all that runs inside `Tensor.backward()`.

Limits, on purpose: tensors keep `device.type == "cpu"`; every tensor is `is_npu`; `torch.get_default_device()` says cpu.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device as default_device

_CPU = torch.device("cpu")
_types = ["npu"]
_name = re.compile(r"(npu|cuda)(:\d+)?")

#: Functions of torch that create tensors, by keyword (rarely positional) `device`, as far as this torch has them.
_FACTORIES = [
    "arange",
    "as_tensor",
    "asarray",
    "bartlett_window",
    "blackman_window",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "kaiser_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "range",
    "scalar_tensor",
    "sparse_coo_tensor",
    "sparse_csr_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
]
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def add_type(device_type: str) -> None:
    """Redirect `device_type` as well: what transfer_to_npu does for `cuda`."""
    if device_type not in _types:
        _types.append(device_type)


def on_device(value: Any) -> bool:
    """Does `value` name the emulated device: "npu", "npu:0", a torch.device, or the index that current_device() returns?"""
    if isinstance(value, torch.device):
        return value.type in _types
    if isinstance(value, str):
        found = _name.fullmatch(value)
        return found is not None and found.group(1) in _types
    return isinstance(value, int) and not isinstance(value, bool)


def device_count() -> int:
    """ASCEND_RT_VISIBLE_DEVICES as on hardware, else eight, or as many as there are ranks on this node."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if visible:
        return len(visible.split(","))
    return max(8, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def require_index(index: int, lowest: int = 0) -> None:
    """RuntimeError for an index that no emulated device has."""
    if not lowest <= index < device_count():
        raise RuntimeError(f"Invalid device ID {index}: the emulated NPU has {device_count()} devices")


def to_cpu(value: Any) -> Any:
    """`value`, or the CPU where it names the emulated device; RuntimeError where there is no device of that index."""
    if not on_device(value):
        return value
    index = value if isinstance(value, int) else torch.device(value).index
    if index is not None:
        require_index(index)
    return _CPU


def redirected(function: Callable[..., Any], *, pinned: bool = False) -> Callable[..., Any]:
    """`function` with its device arguments on the CPU; `pinned` drops pin_memory, which would reach PrivateUse1's hooks."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        kwargs = _device_to_cpu(kwargs)
        if pinned:
            kwargs.pop("pin_memory", None)
        # Positionally an int is a size or a fill value, so only names count.
        args = tuple(to_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args)
        return function(*args, **kwargs)

    return wrapper


def _tensor_to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = args[0] if args else kwargs.get("device")
        if isinstance(target, str) and target == "cpu":
            # A copy from device to host: code relies on it when it then frees the device's storage. A device object is not
            # taken as one, since it is usually another tensor's `device`.
            kwargs["copy"] = True
        return original(self, *_first_to_cpu(args), **_device_to_cpu(kwargs))  # type: ignore[no-any-return]

    return to


def _first_to_cpu(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Positional arguments of a `to` call: only the first can be a device, and there an int is one."""
    return (to_cpu(args[0]), *args[1:]) if args else ()


def _device_to_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": to_cpu(kwargs["device"])} if "device" in kwargs else kwargs


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type()`: `torch.npu.FloatTensor`, or `torch.cuda.FloatTensor` when transfer_to_npu renames; accepts both."""

    @functools.wraps(original)
    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        args = tuple(re.sub(r"^torch\.(npu|cuda)\.", "torch.", a) if isinstance(a, str) else a for a in args)
        wanted = args[0] if args else None
        if isinstance(wanted, type) and hasattr(wanted, "emulated_dtype"):
            args = (wanted.emulated_dtype, *args[1:])
        result = original(self, *args, **kwargs)
        # Only a bare name: under a default device torch calls this function again for the inner call.
        return re.sub(r"^torch\.(?=[A-Z])", type_prefix[0], result) if isinstance(result, str) else result

    return tensor_type


#: What `Tensor.type()` puts before `FloatTensor`; one element, so that transfer_to_npu can replace it.
type_prefix = ["torch.npu."]


_torch_generator = torch.Generator


_metaclass: Any = type(torch.Generator)


class _GeneratorType(_metaclass):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _torch_generator)  # torch.default_generator is one too


class Generator(_torch_generator, metaclass=_GeneratorType):
    """torch.Generator that takes "npu" for the CPU's. A class, since torch evaluates `torch.Generator | None`."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, to_cpu(device))  # type: ignore[call-arg]


def _load(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.load: files written on an NPU name it as location, whatever `map_location` says."""

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, dict):
            map_location = {k: "cpu" if on_device(v) else v for k, v in map_location.items()}
        return original(f, "cpu" if map_location is None else to_cpu(map_location), *args, **kwargs)

    return load


def _host_copy(self: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return self.clone()


def _to_npu(self: Any, device: Any = None, non_blocking: bool = False, **_: Any) -> Any:  # noqa: ARG001
    """`Tensor.npu`, `Module.npu`: already there, but for meta tensors, which cannot be moved."""
    return self.to(_CPU)


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    """Nothing to record: all work is done when a call returns."""


def _autocast() -> None:
    """torch.autocast("npu") is CPU autocast; its default dtype is float16, as the NPU's."""
    original = torch.amp.autocast_mode.autocast.__init__

    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if on_device(device_type):
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype, *args, **kwargs)

    torch.amp.autocast_mode.autocast.__init__ = init  # type: ignore[method-assign]
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        setattr(torch, name, _named_cpu(getattr(torch, name)))
    torch.amp.autocast_mode.is_autocast_available = _named_cpu(torch.amp.autocast_mode.is_autocast_available)
    torch.amp.is_autocast_available = torch.amp.autocast_mode.is_autocast_available


def _named_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(device_type, ...)` with the CPU's name for the emulated device's."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*("cpu" if isinstance(a, str) and on_device(a) else a for a in args), **kwargs)

    return wrapper


def _default_device_context() -> None:
    """`with torch.device("npu")` and torch.set_default_device: torch's context then fills in the CPU."""
    default_device._device_constructors()  # remembers torch's own functions; it must not see the wrapped ones
    original = default_device.DeviceContext.__init__

    @functools.wraps(original)
    def init(self: Any, device: Any) -> None:
        original(self, to_cpu(device))

    default_device.DeviceContext.__init__ = init  # type: ignore[method-assign]


def install() -> None:
    """Wrap torch. Called once, when torch_npu is imported."""
    _default_device_context()
    for name in _FACTORIES:
        setattr(torch, name, redirected(getattr(torch, name), pinned=True))
    for name in _METHODS:
        setattr(torch.Tensor, name, redirected(getattr(torch.Tensor, name), pinned=True))
    torch.load = _load(torch.load)
    torch.Generator = Generator  # type: ignore[misc]
    _autocast()
    tensor: Any = torch.Tensor
    tensor.to = _tensor_to(torch.Tensor.to)
    tensor.cpu = _host_copy
    tensor.pin_memory = _host_copy
    tensor.is_pinned = lambda self, *_: False  # noqa: ARG005
    tensor.npu = _to_npu
    tensor.is_npu = property(lambda self: True)  # noqa: ARG005
    tensor.record_stream = _record_stream
    tensor.type = _type(torch.Tensor.type)
    storage: Any = torch.UntypedStorage
    storage.to = redirected(torch.UntypedStorage.to)
    module: Any = torch.nn.Module
    module.to_empty = redirected(torch.nn.Module.to_empty)
    module.npu = _to_npu
