"""Linear layers, tensor-parallel through megatron-core's own autograd-aware mappings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_engine.pytorch.norm import layer_norm, mark, rms_norm
from transformer_engine.pytorch.strict import PlainBackendError, refuse

#: Arguments that only tune communication or FP8 on CUDA, at the values that ask for nothing.
NEUTRAL: dict[str, Any] = {
    "fuse_wgrad_accumulation": False,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
}


class _Base(nn.Module):
    """What the linear layers share: shards, initialisation, and the attributes that megatron-core reads off parameters."""

    def _setup(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        tp_group: Any,
        tp_size: int,
        get_rng_state_tracker: Callable[[], Any] | None,
        init_method: Callable[[Tensor], Any] | None,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        device: Any,
        rng_tracker_name: str | None,
    ) -> None:
        if parallel_mode not in (None, "column", "row"):
            raise PlainBackendError(f"{type(self).__name__}: parallel_mode={parallel_mode!r} is not supported")
        if tp_size > 1 and tp_group is None:
            raise PlainBackendError(f"{type(self).__name__}: tp_size={tp_size} without tp_group is not supported")
        self.in_features = in_features // tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // tp_size if parallel_mode == "column" else out_features
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self._tracker, self._tracker_name = get_rng_state_tracker, rng_tracker_name
        self._init_method, self._dtype, self._device = init_method, params_dtype, device

    def _new_weight(self) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=self._dtype, device=self._device))
        if self._init_method is not None:
            context: Any = contextlib.nullcontext()
            if self._tracker is not None:
                context = self._tracker().fork(*([self._tracker_name] if self._tracker_name else []))
            with context, torch.no_grad():
                self._init_method(weight)
        # Transformer Engine marks every linear weight as parallel, also where megatron-core cut the shards itself
        # (experts): the global grad norm depends on it.
        mark(weight, tensor_model_parallel=True, partition_dim=1 if self.parallel_mode == "row" else 0, partition_stride=1)
        return weight

    def _new_bias(self) -> nn.Parameter:
        bias = nn.Parameter(torch.zeros(self.out_features, dtype=self._dtype, device=self._device))
        if self.parallel_mode == "row":
            mark(bias, sequence_parallel=self.sequence_parallel)
        elif self.parallel_mode == "column":
            mark(bias, tensor_model_parallel=True, partition_dim=0, partition_stride=1)
        return bias

    def _enter(self, x: Tensor) -> Tensor:
        """Input side of a column-parallel layer: gather the sequence, or copy (whose backward all-reduces)."""
        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        from megatron.core import tensor_parallel as tp

        if self.sequence_parallel:
            x_out: Tensor = tp.gather_from_sequence_parallel_region(x, group=self.tp_group)
            return x_out
        out: Tensor = tp.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        return out

    def _leave(self, y: Tensor) -> Tensor:
        """Output side of a row-parallel layer: sum the partial products."""
        if self.parallel_mode != "row" or self.tp_size == 1:
            return y
        from megatron.core import tensor_parallel as tp

        if self.sequence_parallel:
            x_out: Tensor = tp.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
            return x_out
        out: Tensor = tp.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)
        return out

    def get_extra_state(self) -> Tensor:
        """Transformer Engine keeps FP8 metadata here; without FP8 it is an empty tensor."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, Tensor) and state.numel():
            raise PlainBackendError(f"{type(self).__name__}: FP8 metadata in a checkpoint")


class Linear(_Base):
    """Stands for transformer_engine.pytorch.Linear. Input (..., in), output (..., out) of this rank's shard."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        device: Any = None,
        rng_tracker_name: str | None = None,
        ub_name: str | None = None,
        **other: Any,
    ) -> None:
        del ub_name  # names a CUDA communication buffer
        refuse(type(self).__name__, other, NEUTRAL)
        super().__init__()
        self._setup(
            in_features, out_features, sequence_parallel=sequence_parallel, tp_group=tp_group, tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker, init_method=init_method, parallel_mode=parallel_mode,
            params_dtype=params_dtype, device=device, rng_tracker_name=rng_tracker_name,
        )  # fmt: skip
        self.use_bias, self.return_bias = bias, return_bias
        self.weight = self._new_weight()
        if bias:
            self.bias = self._new_bias()

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """`is_first_microbatch` caches FP8 weights on CUDA; there is nothing to cache."""
        del is_first_microbatch
        y = self._leave(F.linear(self._enter(x), self.weight))
        if not self.use_bias:
            return (y, None) if self.return_bias else y
        return (y, self.bias) if self.return_bias else y + self.bias


class LayerNormLinear(Linear):
    """Stands for transformer_engine.pytorch.LayerNormLinear: a norm, then a linear layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        **kwargs: Any,
    ) -> None:
        if normalization not in ("RMSNorm", "LayerNorm"):
            raise PlainBackendError(f"LayerNormLinear: normalization={normalization!r} is not supported")
        super().__init__(in_features, out_features, **kwargs)
        if self.parallel_mode == "row":
            raise PlainBackendError("LayerNormLinear: parallel_mode='row' is not supported")
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        fill = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = nn.Parameter(fill(in_features, dtype=self._dtype, device=self._device))
        mark(self.layer_norm_weight, sequence_parallel=self.sequence_parallel)
        if normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros_like(self.layer_norm_weight))
            mark(self.layer_norm_bias, sequence_parallel=self.sequence_parallel)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        if self.normalization == "RMSNorm":
            normed = rms_norm(x, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        else:
            normed = layer_norm(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)
        out = super().forward(normed, is_first_microbatch)
        if not self.return_layernorm_output:
            return out
        shown = self._enter(normed) if self.return_layernorm_output_gathered else normed
        return (*out, shown) if self.return_bias else (out, shown)


class GroupedLinear(_Base):
    """Stands for transformer_engine.pytorch.GroupedLinear, as a loop: one product per expert.

    Input (tokens sorted by expert, in), `m_splits` tokens per expert (zero allowed), output (tokens, out).
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        device: Any = None,
        rng_tracker_name: str | None = None,
        ub_name: str | None = None,
        **other: Any,
    ) -> None:
        del ub_name
        refuse("GroupedLinear", other, NEUTRAL)
        if tp_size > 1:
            raise PlainBackendError(f"GroupedLinear: tp_size={tp_size} is not supported; the dispatcher communicates")
        super().__init__()
        self._setup(
            in_features, out_features, sequence_parallel=sequence_parallel, tp_group=tp_group, tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker, init_method=init_method, parallel_mode=parallel_mode,
            params_dtype=params_dtype, device=device, rng_tracker_name=rng_tracker_name,
        )  # fmt: skip
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", self._new_weight())
            if bias:
                self.register_parameter(f"bias{i}", self._new_bias())

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """megatron-core calls it when it loads a state dict; there is no FP8 metadata."""
        del num_gemms

    def forward(self, x: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None) -> Any:
        del is_first_microbatch
        sizes = [int(size) for size in m_splits]
        if len(sizes) != self.num_gemms or sum(sizes) != x.shape[0]:
            raise PlainBackendError(f"GroupedLinear: m_splits={sizes} for {self.num_gemms} experts, {x.shape[0]} tokens")
        parts = []
        for i, part in enumerate(torch.split(x, sizes)):
            y = F.linear(part, getattr(self, f"weight{i}"))
            parts.append(y + getattr(self, f"bias{i}") if self.use_bias and not self.return_bias else y)
        out = torch.cat(parts)
        if not self.return_bias:
            return out
        return out, [getattr(self, f"bias{i}") for i in range(self.num_gemms)] if self.use_bias else None
