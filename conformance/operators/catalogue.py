"""The families: how each draws its cases, the cases that every run starts with, and what checks one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis.strategies import SearchStrategy

from conformance.operators import Family, strategies
from conformance.operators.attention import AttentionCase
from conformance.operators.attention_checks import check_backward, check_forward
from conformance.operators.elementwise import (
    AdamWCase,
    RmsNormCase,
    RotaryCase,
    SwigluCase,
    check_adamw,
    check_rms_norm,
    check_rotary,
    check_swiglu,
)
from conformance.operators.matmul import (
    CollectiveCase,
    GroupedCase,
    check_all_gather,
    check_all_reduce,
    check_grouped,
    check_reduce_scatter,
)
from conformance.operators.moe import MoeCase, check_permute, check_unpermute


@dataclass(frozen=True)
class Entry:
    """One family. `check` takes (case, surface), and rank and ranks where the operator talks to others.

    `share`: of a profile's examples, how many this family draws; it is smaller where a case is dear.
    """

    strategy: SearchStrategy[Any]
    named: Mapping[str, Any]
    check: Callable[..., Any]
    share: float = 1.0


_TND = AttentionCase("TND", "float32", 4, 2, 8, 8, (3, 5), (3, 5))
_BNSD = AttentionCase("BNSD", "float32", 4, 2, 8, 6, (5, 5), (8, 8))
_LONGER = replace(_TND, heads=2, kv_heads=1, dtype="bfloat16", queries=(2060,), keys=(2060,), mask="triangle")
_ATTENTION = {
    "grouped_queries": replace(_BNSD, heads=6, kv_heads=2, value_width=4),
    "causal_fewer_keys": replace(_BNSD, mode=3, mask="triangle", queries=(6, 6), keys=(4, 4)),
    "causal_top_left": replace(_BNSD, layout="SBH", mode=2, mask="triangle", queries=(5, 5), keys=(8, 8)),
    "band": replace(_BNSD, layout="BSND", mode=4, mask="triangle", before=2, after=1),
    "explicit_band": replace(_BNSD, mask="random", before=2, after=3),
    "rows_masked": replace(_BNSD, mode=1, mask="rows", mask_form="BNSS"),
    "hidden_keys": replace(_BNSD, layout="BSH", mode=1, mask="padding"),
    "packed_empty_member": replace(_TND, queries=(0, 3, 0, 1), keys=(0, 3, 0, 1), leading_zero=True, mode=3, mask="triangle"),
    "packed_tail": replace(_TND, tail=4, mode=3, mask="triangle"),
    "packed_explicit_mask": replace(_TND, mode=1, mask="random"),
    "packed_more_keys": replace(_TND, queries=(3, 2), keys=(5, 4), mode=2, mask="triangle"),
    "long_member": replace(_TND, heads=1, kv_heads=1, queries=(1, 600), keys=(1, 600), mode=3, mask="triangle"),
    "longer_than_the_mask": replace(_TND, heads=1, kv_heads=1, queries=(2060, 3), keys=(2060, 3), mode=3, mask="triangle"),
    "long_and_grouped": replace(_TND, dtype="bfloat16", queries=(1, 600), keys=(1, 601), mode=2, mask="triangle"),
    "long_band": replace(_TND, queries=(600,), keys=(610,), mode=4, mask="triangle", before=300, after=3),
    "long_batch": replace(_BNSD, heads=2, kv_heads=1, queries=(520, 520), keys=(530, 530), mode=3, mask="triangle"),
    "longer_band": replace(_LONGER, mode=4, before=100, after=0),
    "longer_top_left": replace(_LONGER, mode=2),
    "model_heads": replace(_BNSD, layout="BSH", width=128, value_width=128, scale=0.09),
    "model_heads_packed": replace(_TND, width=64, value_width=64, scale=0.125, mode=3, mask="triangle"),
    "narrower_values": replace(_BNSD, dtype="bfloat16", width=192, value_width=128, scale=0.07),
    "packed_no_queries": replace(_TND, queries=(0, 3), keys=(4, 3)),
    "strided_mask": replace(_BNSD, mode=1, mask="random", mask_form="B1SS", others="transposed"),
    "summed": replace(_TND, incoming="expanded", mode=3, mask="triangle"),
    "ring": replace(_BNSD, layout="SBH", value_width=8, queries=(4, 4), keys=(8, 8)),
    "ring_of_packed_members": replace(_TND, queries=(3, 5), keys=(5, 8)),
    "ring_causal": replace(_BNSD, layout="SBH", mode=3, mask="triangle", queries=(8, 8)),
    "ring_bfloat16": replace(_BNSD, layout="SBH", dtype="bfloat16", value_width=8, queries=(4, 4), keys=(8, 8)),
    "bfloat16": replace(_BNSD, dtype="bfloat16"),
    "float16": replace(_TND, dtype="float16"),
}
_MOE = {
    "one_expert_takes_all": MoeCase("routing_map", 6, 3, 4, 1, "float32", "tied"),
    "half_get_nothing": MoeCase("routing_map", 7, 3, 6, 2, "float32", "few"),
    "map_without_probs": MoeCase("routing_map", 7, 3, 6, 2, "float32", with_probs=False),
    "chosen_twice": MoeCase("indices", 6, 3, 4, 3, "float32", "twice"),
    "four_choices": MoeCase("indices", 9, 3, 7, 4, "float32"),
    "flat_indices": MoeCase("indices", 9, 3, 7, 1, "float32", flat=True),
    "narrow_indices": MoeCase("indices", 9, 3, 7, 2, "float32", narrow=True),
    "narrow_map": MoeCase("routing_map", 9, 3, 7, 4, "float32", narrow=True),
    "many_rows": MoeCase("indices", 50, 3, 16, 4, "float32"),
    "many_rows_by_map": MoeCase("routing_map", 300, 3, 16, 4, "bfloat16"),
    "bfloat16": MoeCase("indices", 9, 8, 7, 3, "bfloat16"),
    "strided": MoeCase("indices", 9, 3, 7, 2, "float32", strides="transposed", others="sliced", incoming="expanded"),
    "strided_map": MoeCase("routing_map", 9, 3, 7, 2, "float32", others="transposed", incoming="transposed"),
    "capacity": MoeCase("drop_and_pad", 6, 3, 4, 2, "float32", capacity=3),
    "capacity_bfloat16": MoeCase("drop_and_pad", 6, 3, 4, 2, "bfloat16", "one", capacity=5),
}
#: Of permutation alone.
_PERMUTED = {
    "rows_dropped": MoeCase("indices", 8, 3, 4, 2, "float32", dropped=5),
    "rows_dropped_from_the_end": MoeCase("indices", 8, 3, 4, 2, "float32", dropped=5, from_the_end=True),
    "no_tokens": MoeCase("indices", 0, 3, 4, 2, "float32"),
    "no_tokens_by_map": MoeCase("routing_map", 0, 3, 4, 2, "float32"),
}
_GROUPED = {
    "empty_experts": GroupedCase((0, 3, 0, 2), 5, 4, "float32"),
    "one_takes_all": GroupedCase((0, 7, 0), 5, 4, "float32", totals=True, with_bias=True),
    "bias_of_bfloat16": GroupedCase((2, 0, 3), 5, 4, "bfloat16", with_bias=True),
    "several_weights": GroupedCase((2, 0, 3), 5, 4, "float16", one_weight=False, split_item=2),
    "list": GroupedCase((2, 1, 3), 5, 4, "float32", totals=True, one_weight=False, split_item=1, entry="list"),
    "transposed_weights": GroupedCase((2, 0, 3), 5, 4, "float32", strides="transposed"),
    "gradient_of_weights": GroupedCase((2, 0, 3), 5, 4, "float32", group_type=2),
    "gradient_without_rows": GroupedCase((0, 0), 5, 4, "float32", group_type=2),
    "kernel": GroupedCase((2, 0, 3), 5, 4, "float32", entry="kernel", totals=True),
    "no_rows": GroupedCase((0, 0), 5, 4, "float32"),
    "long_sum": GroupedCase((2, 3), 4096, 3, "bfloat16"),
}
_COLLECTIVE = {
    "float16": CollectiveCase(2, 256, 5, "float16"),
    "bias": CollectiveCase(2, 256, 5, "float16", with_bias=True),
    "nothing_gathered": CollectiveCase(2, 256, 5, "float16", gather_output=False),
    "bfloat16": CollectiveCase(3, 300, 4, "bfloat16"),
    "transposed": CollectiveCase(2, 256, 5, "float16", strides="transposed"),
}
#: Of the sum that all ranks get, which is not for training and takes more.
_SUMMED = {
    "batch": CollectiveCase(2, 256, 5, "float16", batch=3),
    "short_sum": CollectiveCase(2, 8, 5, "bfloat16", with_bias=True),
}

CATALOGUE: dict[Family, Entry] = {
    "fusion_attention": Entry(strategies.attention(), _ATTENTION, check_forward),
    "fusion_attention_backward": Entry(strategies.attention(), _ATTENTION, check_backward),
    "rms_norm": Entry(
        strategies.rms_norm(),
        {
            "small_input": RmsNormCase((3, 16), 1, "float32", epsilon=1e-5, size=0.01),
            "two_dimensions": RmsNormCase((4, 2, 6), 2, "float32"),
            "zero_row": RmsNormCase((3, 8), 1, "float32", zero_row=True),
            "one_column": RmsNormCase((4, 1), 1, "float32"),
            "many_rows": RmsNormCase((2000, 4), 1, "float32"),
            "bfloat16": RmsNormCase((5, 64), 1, "bfloat16"),
            "strided": RmsNormCase((3, 16), 1, "float32", strides="transposed", others="sliced", incoming="expanded"),
        },
        check_rms_norm,
    ),
    "swiglu": Entry(
        strategies.swiglu(),
        {
            "last": SwigluCase((3, 8), -1, "float32"),
            "first": SwigluCase((4, 3), 0, "float32"),
            "large_gates": SwigluCase((4, 16), -1, "float32", size=40.0),
            "no_tokens": SwigluCase((0, 8), -1, "float32"),
            "bfloat16": SwigluCase((5, 64), -1, "bfloat16"),
            "summed": SwigluCase((3, 8), -1, "float32", incoming="expanded"),
        },
        check_swiglu,
    ),
    "moe_permute": Entry(strategies.moe(), _MOE | _PERMUTED, check_permute),
    "moe_unpermute": Entry(strategies.moe(undone=True), _MOE, check_unpermute),
    "grouped_matmul": Entry(strategies.grouped_matmul(), _GROUPED, check_grouped),
    "all_gather_matmul": Entry(strategies.collective(), _COLLECTIVE, check_all_gather, 0.4),
    "matmul_reduce_scatter": Entry(strategies.collective(), _COLLECTIVE, check_reduce_scatter, 0.4),
    "matmul_all_reduce": Entry(strategies.collective(batched=True), _COLLECTIVE | _SUMMED, check_all_reduce, 0.4),
    "rotary": Entry(
        strategies.rotary(),
        {
            "half": RotaryCase((3, 2, 2, 8), (1, 2), "half", "float32"),
            "interleave": RotaryCase((3, 2, 2, 8), (1, 2), "interleave", "float32"),
            "kernel": RotaryCase((3, 2, 2, 8), (1, 2), "interleave", "float32", entry="kernel"),
            "own_tables": RotaryCase((2, 2, 5, 32), (), "half", "float32"),
            "tables_of_a_member": RotaryCase((2, 3, 2, 8), (2,), "half", "float32"),
            "bfloat16": RotaryCase((3, 2, 2, 8), (0, 2), "half", "bfloat16"),
            "strided": RotaryCase((3, 2, 2, 8), (1, 2), "half", "float32", others="sliced", incoming="expanded"),
        },
        check_rotary,
    ),
    "fused_adamw": Entry(
        strategies.fused_adamw(),
        {
            "first_update": AdamWCase((7,), "float32", taken=1),
            "three_updates": AdamWCase((7,), "float32", taken=3, epsilon=1e-3),
            "amsgrad": AdamWCase((7,), "float32", taken=3, amsgrad=True),
            "maximize": AdamWCase((7,), "float32", maximize=True),
            "kernel": AdamWCase((7,), "float32", taken=3, entry="kernel"),
            "small_gradients": AdamWCase((7,), "float32", size=0.01, epsilon=1e-3),
            "bfloat16": AdamWCase((3, 5), "bfloat16"),
            "sliced": AdamWCase((3, 5), "float32", amsgrad=True, strides="sliced"),
            "transposed": AdamWCase((3, 5), "float32", strides="transposed"),
        },
        check_adamw,
    ),
}
