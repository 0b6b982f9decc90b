"""Linear and LayerNormLinear: a matrix product in the input's dtype, between megatron-core's own collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..errors import only, refuse
from .norm import layer_norm, rms_norm
from .parameters import HighPrecision, Init, WeightMaker, filled, mark

Device = torch.device | str | int
Output = Tensor | tuple[Tensor | None, ...]


def partition(what: str, size: int, parts: int) -> int:
    """`size / parts`. ValueError if that leaves a rest."""
    if size % parts:
        raise ValueError(f"{what}={size} is not divisible by tp_size={parts}")
    return size // parts


class Linear(HighPrecision):
    """`y = x @ weight.T + bias`, sharded over `tp_group` by columns (of the output) or rows (of the input) of `x @
    weight.T`.

    column: `x` is replicated, or split along dimension 0 with `sequence_parallel`; `y` is split along its last
    dimension. row: `x` is split along its last dimension; `y` is replicated, or split along dimension 0 with
    `sequence_parallel`. None: no communication, whatever `tp_size`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Init | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: object = None,
        device: Device = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        # megatron-core's own layers cannot accumulate into main_grad without Apex's kernel, so no model gets this far
        # with it.
        only(owner, False, fuse_wgrad_accumulation=fuse_wgrad_accumulation)
        # Overlap of communication changes when, not what; but a run that asks for it must not believe that it got it.
        only(owner, False, ub_overlap_ag=ub_overlap_ag, ub_overlap_rs=ub_overlap_rs)
        only(owner, False, ub_overlap_rs_dgrad=ub_overlap_rs_dgrad, ub_bulk_dgrad=ub_bulk_dgrad)
        only(owner, False, ub_bulk_wgrad=ub_bulk_wgrad)
        only(owner, None, parameters_split=parameters_split)
        if parallel_mode not in (None, "column", "row"):
            refuse(owner, "parallel_mode", parallel_mode)
        self.in_features = partition("in_features", in_features, tp_size if parallel_mode == "row" else 1)
        self.out_features = partition("out_features", out_features, tp_size if parallel_mode == "column" else 1)
        self.parallel_mode = parallel_mode
        self.tp_size = tp_size
        self.tp_group = tp_group
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.use_bias = bias
        self.return_bias = return_bias
        self.ub_name = ub_name
        self.fuse_wgrad_accumulation = False
        make = WeightMaker(
            self.out_features,
            self.in_features,
            parallel_mode,
            params_dtype,
            device,
            init_method,
            get_rng_state_tracker,
            rng_tracker_name,
        )
        self.weight = make()
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = filled(self.out_features, 0.0, params_dtype, device)
            if parallel_mode == "column":
                mark(self.bias, tensor_model_parallel=True, partition_dim=0, partition_stride=1)
            elif parallel_mode == "row":
                mark(self.bias, sequence_parallel=self.sequence_parallel)

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """For layers made before the groups were."""
        self.tp_group = tp_group

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Output:
        """`inp`: (..., in_features). The output, or with `return_bias` (output without bias, bias or None).

        `is_first_microbatch` steers a cache of FP8 weights, of which there is none.
        """
        del is_first_microbatch
        only(type(self).__name__, False, fp8_output=fp8_output, fp8_grad=fp8_grad)
        return self._outputs(self._product(self._gathered(inp)))

    def _outputs(self, product: Tensor) -> Output:
        if self.return_bias:
            return product, self.bias
        return product if self.bias is None else product + self.bias

    @property
    def _communicates(self) -> bool:
        if self.parallel_mode is None or self.tp_size == 1:
            return False
        if self.tp_group is None:
            raise ValueError(f"{type(self).__name__}: tp_size={self.tp_size} without tp_group")
        return True

    def _gathered(self, x: Tensor) -> Tensor:
        """The input of the product: the whole sequence. Backward sums its gradient over the TP ranks."""
        if self.parallel_mode != "column" or not self._communicates:
            return x
        from megatron.core.tensor_parallel import mappings

        if self.sequence_parallel:
            whole = mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            whole = mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)
        # megatron-core's all-reduce drops its result for a tensor that is not contiguous, and the gradient of a
        # product has the layout of the input.
        return whole.contiguous()  # type: ignore[no-any-return]

    def _product(self, whole: Tensor) -> Tensor:
        product = F.linear(whole, self.weight)
        if self.parallel_mode != "row" or not self._communicates:
            return product
        from megatron.core.tensor_parallel import mappings

        reduce = (
            mappings.reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else mappings.reduce_from_tensor_model_parallel_region
        )
        return reduce(product.contiguous(), group=self.tp_group)  # type: ignore[no-any-return]


class LayerNormLinear(Linear):
    """A norm over the last dimension, then `Linear`. More parameters: `layer_norm_weight`, `layer_norm_bias`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Device = "cuda",
        **linear: Any,
    ) -> None:
        owner = type(self).__name__
        if parallel_mode == "row":
            refuse(owner, "parallel_mode", parallel_mode, "a norm over a part of the hidden dimension")
        if normalization not in ("RMSNorm", "LayerNorm"):
            refuse(owner, "normalization", normalization)
        super().__init__(  # takes what is left, and raises TypeError for what it does not know
            in_features, out_features, params_dtype=params_dtype, parallel_mode=parallel_mode, device=device, **linear
        )
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        gamma = 0.0 if zero_centered_gamma else 1.0
        self.layer_norm_weight = filled(in_features, gamma, params_dtype, device)
        mark(self.layer_norm_weight, sequence_parallel=self.sequence_parallel)
        self.layer_norm_bias: nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = filled(in_features, 0.0, params_dtype, device)
            mark(self.layer_norm_bias, sequence_parallel=self.sequence_parallel)

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Output:
        """As `Linear`; with `return_layernorm_output` the norm's output comes last, gathered if so asked."""
        del is_first_microbatch
        only(type(self).__name__, False, fp8_output=fp8_output, fp8_grad=fp8_grad)
        normed = self._norm(inp)
        whole = self._gathered(normed)
        outputs = self._outputs(self._product(whole))
        if not self.return_layernorm_output:
            return outputs
        # Without sequence parallel `normed` is whole already, and its gradient must not be summed over the TP ranks.
        returned = whole if self.return_layernorm_output_gathered and self.sequence_parallel else normed
        return (*outputs, returned) if isinstance(outputs, tuple) else (outputs, returned)

    def _norm(self, x: Tensor) -> Tensor:
        if self.layer_norm_bias is None:
            return rms_norm(x, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        return layer_norm(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma)
