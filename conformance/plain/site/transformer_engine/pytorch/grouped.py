"""GroupedLinear: one linear layer per expert, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import only, refuse
from .parameters import HighPrecision, Init, WeightMaker, filled, mark

Device = torch.device | str | int


class GroupedLinear(HighPrecision):
    """`num_gemms` linear layers over consecutive rows of one input. Parameters: `weight0`, `weight1`, ... (and
    `bias0`, ...).

    It does not communicate: megatron-core's token dispatcher does, and passes shards with `parallel_mode=None`.
    """

    def __init__(
        self,
        num_gemms: int,
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
        device: Device = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        only(owner, False, fuse_wgrad_accumulation=fuse_wgrad_accumulation)
        only(owner, False, ub_overlap_rs=ub_overlap_rs, ub_overlap_ag=ub_overlap_ag)
        only(owner, 1, tp_size=tp_size)  # which also makes sequence_parallel and tp_group meaningless
        if parallel_mode not in (None, "column", "row"):
            refuse(owner, "parallel_mode", parallel_mode)
        del sequence_parallel
        self.num_gemms = num_gemms
        self.in_features = in_features
        self.out_features = out_features
        self.parallel_mode = parallel_mode
        self.tp_size = tp_size
        self.tp_group = tp_group
        self.sequence_parallel = False
        self.use_bias = bias
        self.return_bias = return_bias
        self.ub_name = ub_name
        self.fuse_wgrad_accumulation = False
        make = WeightMaker(
            out_features,
            in_features,
            parallel_mode,
            params_dtype,
            device,
            init_method,
            get_rng_state_tracker,
            rng_tracker_name,
        )
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", make())
            if bias:
                self.register_parameter(f"bias{i}", filled(out_features, 0.0, params_dtype, device))
                if parallel_mode == "column":
                    mark(self._bias(i), tensor_model_parallel=True, partition_dim=0, partition_stride=1)
                elif parallel_mode == "row":
                    mark(self._bias(i), sequence_parallel=False)

    def set_tensor_parallel_group(self, tp_group: ProcessGroup | None) -> None:
        """Kept, not used: there is no communication."""
        self.tp_group = tp_group

    def forward(
        self, inp: Tensor, m_splits: Sequence[int], is_first_microbatch: bool | None = None
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """`inp`: (tokens, in_features), the rows of expert 0 first; `m_splits`: rows per expert, some may be 0.

        The output (tokens, out_features), or with `return_bias` (output without bias, biases). ValueError: the splits
        do not add up.
        """
        del is_first_microbatch  # steers a cache of FP8 weights, of which there is none
        splits = [int(rows) for rows in m_splits]
        if len(splits) != self.num_gemms or sum(splits) != inp.shape[0]:
            raise ValueError(f"m_splits={splits} for {self.num_gemms} experts and {inp.shape[0]} rows")
        biased = self.use_bias and not self.return_bias
        # An expert without rows still takes part, so that its weight gets a gradient (of zero), which megatron-core
        # waits for.
        output = torch.cat(
            [
                F.linear(rows, self._weight(i), self._bias(i) if biased else None)
                for i, rows in enumerate(torch.split(inp, splits))
            ]
        )
        if self.return_bias:
            return output, [self._bias(i) for i in range(self.num_gemms)] if self.use_bias else []
        return output

    def _weight(self, i: int) -> Tensor:
        weight: Tensor = getattr(self, f"weight{i}")
        return weight

    def _bias(self, i: int) -> Tensor:
        bias: Tensor = getattr(self, f"bias{i}")
        return bias
