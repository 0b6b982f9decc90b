"""Conformance of the operators of namespace `npu` with generated inputs: the vendor's kernels on an NPU, else the emulation.

A family is what one test runs: cases drawn by hypothesis and cases with names, each checked against a float64 truth that
shares no code with the emulation. This module has names only, so that `matrix.yaml` can be checked without torch.
"""

from __future__ import annotations

from typing import Literal, get_args

Family = Literal[
    "fusion_attention",
    "fusion_attention_backward",
    "rms_norm",
    "swiglu",
    "moe_permute",
    "moe_unpermute",
    "grouped_matmul",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "rotary",
    "fused_adamw",
]
FAMILIES: tuple[Family, ...] = get_args(Family)
#: Families whose operator talks to other ranks, each run on 2 and on 4.
COLLECTIVE: tuple[Family, ...] = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
