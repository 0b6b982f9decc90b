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
    "ring": replace(_BNSD, layout="SBH", value_width=8, queries=(4, 4), keys=(8, 8)),
    "ring_of_packed_members": replace(_TND, queries=(3, 5), keys=(5, 8)),
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
    "rows_dropped": MoeCase("indices", 8, 3, 4, 2, "float32", dropped=5),
    "no_tokens": MoeCase("indices", 0, 3, 4, 2, "float32"),
    "no_tokens_by_map": MoeCase("routing_map", 0, 3, 4, 2, "float32"),
    "capacity": MoeCase("drop_and_pad", 6, 3, 4, 2, "float32", capacity=3),
    "capacity_bfloat16": MoeCase("drop_and_pad", 6, 3, 4, 2, "bfloat16", "one", capacity=5),
}
_GROUPED = {
    "empty_experts": GroupedCase((0, 3, 0, 2), 5, 4, "float32"),
    "one_takes_all": GroupedCase((0, 7, 0), 5, 4, "float32", totals=True, with_bias=True),
    "weights_in_a_list": GroupedCase((2, 0, 3), 5, 4, "float32", one_weight=False, split_item=1),
    "gradient_of_weights": GroupedCase((2, 0, 3), 5, 4, "float32", group_type=2),
    "kernel": GroupedCase((2, 0, 3), 5, 4, "float32", entry="kernel", totals=True),
    "no_rows": GroupedCase((0, 0), 5, 4, "float32"),
    "long_sum": GroupedCase((2, 3), 4096, 3, "bfloat16"),
}
_COLLECTIVE = {
    "plain": CollectiveCase(2, 8, 5, "float32"),
    "bias": CollectiveCase(2, 8, 5, "float32", with_bias=True),
    "nothing_gathered": CollectiveCase(2, 8, 5, "float32", gather_output=False),
    "bfloat16": CollectiveCase(3, 64, 4, "bfloat16"),
    "transposed": CollectiveCase(2, 8, 5, "float32", strides="transposed"),
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
        },
        check_swiglu,
    ),
    "moe_permute": Entry(strategies.moe(), _MOE, check_permute),
    "moe_unpermute": Entry(strategies.moe(), _MOE, check_unpermute),
    "grouped_matmul": Entry(strategies.grouped_matmul(), _GROUPED, check_grouped),
    "all_gather_matmul": Entry(strategies.collective(), _COLLECTIVE, check_all_gather, 0.4),
    "matmul_reduce_scatter": Entry(strategies.collective(), _COLLECTIVE, check_reduce_scatter, 0.4),
    "matmul_all_reduce": Entry(strategies.collective(), _COLLECTIVE, check_all_reduce, 0.4),
    "rotary": Entry(
        strategies.rotary(),
        {
            "half": RotaryCase((3, 2, 2, 8), (1, 2), "half", "float32"),
            "interleave": RotaryCase((3, 2, 2, 8), (1, 2), "interleave", "float32"),
            "kernel": RotaryCase((3, 2, 2, 8), (0,), "interleave", "float32", entry="kernel"),
            "own_tables": RotaryCase((2, 2, 2, 4), (), "half", "float32"),
            "bfloat16": RotaryCase((3, 2, 2, 8), (0, 1), "half", "bfloat16"),
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
        },
        check_adamw,
    ),
}
