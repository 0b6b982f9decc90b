"""Parameters as megatron-core expects them: their random stream, their marks, and an empty extra state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import refuse

Init = Callable[[Tensor], object]
#: megatron-core's stream of random numbers that is the same on all TP ranks.
_REPLICATED_STREAM = "data-parallel-rng"


def mark(parameter: Tensor, **marks: object) -> None:
    """Set the attributes that megatron-core's gradient reduction, norm and checkpoints go by."""
    for name, value in marks.items():
        setattr(parameter, name, value)


def filled(size: int, value: float, dtype: torch.dtype | None, device: torch.device | str | int) -> nn.Parameter:
    """A constant parameter of shape (size,)."""
    return nn.Parameter(torch.full((size,), value, dtype=dtype or torch.get_default_dtype(), device=device))


@dataclass(frozen=True)
class WeightMaker:
    """Makes the weights of one layer, of shape (out_features, in_features) per partition, from one random stream."""

    out_features: int
    in_features: int
    parallel_mode: str | None
    params_dtype: torch.dtype | None
    device: torch.device | str | int
    init_method: Init | None
    get_rng_state_tracker: Callable[[], Any] | None
    rng_tracker_name: str | None

    def __call__(self) -> nn.Parameter:
        if str(self.device) == "meta":
            refuse("Linear", "device", self.device, "parameters are initialised when they are made")
        dtype = self.params_dtype or torch.get_default_dtype()
        weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.device))
        with torch.no_grad(), self._stream():
            (self.init_method or _default_init)(weight)
        # Without a parallel mode a weight is either an expert's shard, whose communication the dispatcher does, or
        # the same on all TP ranks. megatron-core counts a marked weight in the grad norm on every TP rank, so only a
        # shard is marked.
        if self.rng_tracker_name != _REPLICATED_STREAM:
            dim = 1 if self.parallel_mode == "row" else 0
            mark(weight, tensor_model_parallel=True, partition_dim=dim, partition_stride=1)
        return weight

    def _stream(self) -> contextlib.AbstractContextManager[Any]:
        if self.get_rng_state_tracker is None:
            return contextlib.nullcontext()
        tracker = self.get_rng_state_tracker()
        names = (self.rng_tracker_name,) if self.rng_tracker_name else ()  # else the tracker's own default stream
        return tracker.fork(*names)  # type: ignore[no-any-return]


def _default_init(weight: Tensor) -> None:
    nn.init.normal_(weight, mean=0.0, std=0.023)


class HighPrecision(nn.Module):
    """Base of the linear layers: FP8 is off for whoever reads its state, the saved extra state is empty."""

    fp8 = False
    fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing to initialise."""

    def get_extra_state(self) -> Tensor:
        """An empty uint8 tensor: how Transformer Engine 2 says that there is no FP8 state."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Takes what `get_extra_state` gives; refuses FP8 state."""
        if state is not None and state.numel() > 0:
            refuse(type(self).__name__, "extra_state", tuple(state.shape), "a checkpoint with FP8 state")
