"""torch.npu.FloatTensor and its kind: usable as constructors and in isinstance, as the legacy tensor types of torch.cuda."""

from __future__ import annotations

from typing import Any

import torch


class _TensorType(type):
    emulated_dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.dtype is cls.emulated_dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`FloatTensor(2, 3)` is uninitialized of that shape, `FloatTensor([1.0])` holds the data, as torch's legacy types."""
        kwargs.pop("device", None)
        if args and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=cls.emulated_dtype, **kwargs)
        return torch.empty(args or (0,), dtype=cls.emulated_dtype, **kwargs)


def _tensor_type(name: str, dtype: torch.dtype) -> Any:
    return _TensorType(name, (), {"emulated_dtype": dtype, "dtype": dtype, "__module__": "torch.npu", "__doc__": f"{dtype}."})


FloatTensor = _tensor_type("FloatTensor", torch.float32)
HalfTensor = _tensor_type("HalfTensor", torch.float16)
BFloat16Tensor = _tensor_type("BFloat16Tensor", torch.bfloat16)
DoubleTensor = _tensor_type("DoubleTensor", torch.float64)
BoolTensor = _tensor_type("BoolTensor", torch.bool)
ByteTensor = _tensor_type("ByteTensor", torch.uint8)
CharTensor = _tensor_type("CharTensor", torch.int8)
ShortTensor = _tensor_type("ShortTensor", torch.int16)
IntTensor = _tensor_type("IntTensor", torch.int32)
LongTensor = _tensor_type("LongTensor", torch.int64)
