# ruff: noqa: E501 - the table has one refusal a line
"""What the vendor's documentation forbids raises with a sentence that says what is wrong, for every operator that computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_npu_ops_support import ops, randn
from torch import Tensor

pytestmark = pytest.mark.stack

npu = torch.ops.npu
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
Call = Callable[[], Any]


def attention(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "query": randn(2, 4, 5, 8),
        "key": randn(2, 2, 6, 8),
        "value": randn(2, 2, 6, 8),
        "head_num": 4,
        "input_layout": "BNSD",
    } | changes
    return npu.npu_fusion_attention(**arguments)


def attention_grad(**changes: Any) -> Any:
    q, k, v = randn(2, 4, 5, 8), randn(2, 2, 6, 8), randn(2, 2, 6, 8)
    out, top, total, *_ = npu.npu_fusion_attention(q, k, v, 4, "BNSD")
    given: dict[str, Any] = {"dy": randn(2, 4, 5, 8), "softmax_max": top, "softmax_sum": total, "attention_in": out}
    given |= changes
    return npu.npu_fusion_attention_grad(q, k, v, given.pop("dy"), 4, "BNSD", **given)


def packed(**changes: Any) -> Any:
    t = randn(6, 2, 4)
    arguments: dict[str, Any] = {"actual_seq_qlen": [2, 6], "actual_seq_kvlen": [2, 6]} | changes
    return npu.npu_fusion_attention(t, t, t, 2, "TND", **arguments)


def softmax(x: Tensor, mask: Tensor) -> Any:
    return npu.npu_scaled_masked_softmax(x, mask)


def grouped(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "x": [randn(5, 4)],
        "weight": [randn(3, 4, 6)],
        "group_list": torch.tensor([2, 0, 3]),
        "group_list_type": 1,
        "split_item": 3,
        "group_type": 0,
    } | changes
    return npu.npu_grouped_matmul(**arguments)


def by_map(**changes: Any) -> Any:
    routing = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    arguments: dict[str, Any] = {"tokens": randn(4, 3), "routing_map": routing, "num_out_tokens": 8} | changes
    return npu.npu_moe_token_permute_with_routing_map(**arguments)


def back_by_map(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "permuted_tokens": randn(8, 3),
        "sorted_indices": torch.arange(8, dtype=torch.int32),
        "restore_shape": [4, 3],
    } | changes
    return npu.npu_moe_token_unpermute_with_routing_map(**arguments)


def half(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.bfloat16)


def gather(x: Tensor | None = None, w: Tensor | None = None, world_size: int = 2) -> Any:
    return npu.npu_all_gather_base_mm(half(2, 3) if x is None else x, half(3, 4) if w is None else w, "tp", world_size)


def scatter(x: Tensor, w: Tensor) -> Any:
    return npu.npu_mm_reduce_scatter_base(x, w, "tp", 2)


def reduce(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Any:
    return npu.npu_mm_all_reduce_base(x, w, "tp", bias=bias)


def rotary(x: Tensor, *table: int, mode: str = "half") -> Any:
    return npu.npu_rotary_mul(x, *[torch.ones(table, dtype=x.dtype)] * 2, mode)


def adam(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "grad": randn(4),
        "max_grad_norm": None,
        "amsgrad": False,
        "out": [randn(4), randn(4), randn(4).abs()],
    } | changes
    numbers = 1.0, 1.0, 0.1, 0.0, 0.9, 0.99, 1e-6
    return npu.npu_apply_adam_w(
        *numbers, arguments["grad"], arguments["max_grad_norm"], arguments["amsgrad"], False, out=arguments["out"]
    )


INDICES = torch.tensor([[0, 2], [1, 2], [0, 1]])
ORDER = torch.arange(6, dtype=torch.int32)

#: (operator, what is wrong, the call, words of the sentence)
REFUSALS: list[tuple[str, str, Call, str]] = [
    ("npu_fusion_attention", "layout", lambda: attention(input_layout="NBSD"), "input_layout must be one of"),
    ("npu_fusion_attention", "mask_rank", lambda: attention(atten_mask=torch.zeros(2, 5, 6).bool()), "fits neither SS"),
    ("npu_fusion_attention", "mask_size", lambda: attention(atten_mask=torch.zeros(6, 5).bool()), "fits neither SS"),
    ("npu_fusion_attention", "mask_dtype", lambda: attention(atten_mask=torch.zeros(5, 6)), "must be bool or uint8"),
    ("npu_fusion_attention", "mask_not_compressed", lambda: attention(atten_mask=torch.zeros(5, 6).bool(), sparse_mode=3), "compressed"),
    ("npu_fusion_attention", "mask_not_triangular", lambda: attention(atten_mask=TRIANGLE.T.contiguous(), sparse_mode=2), "strictly above"),
    ("npu_fusion_attention", "band_and_mask_disagree", lambda: attention(atten_mask=torch.zeros(5, 6).bool(), pre_tockens=1, next_tockens=1), "allows keys beyond"),
    ("npu_fusion_attention", "dtypes", lambda: attention(key=randn(2, 2, 6, 8).float()), "must have one dtype"),
    ("npu_fusion_attention", "whole_numbers", lambda: attention(**{n: torch.ones(2, 4, 5, 8, dtype=torch.int32) for n in ("query", "key", "value")}), "must be floating"),
    ("npu_fusion_attention", "rank", lambda: attention(query=randn(2, 5, 32)), "4-dimensional"),
    ("npu_fusion_attention", "head_num", lambda: attention(head_num=3), "query has 4 heads"),
    ("npu_fusion_attention", "no_heads", lambda: attention(head_num=0), "must be positive"),
    ("npu_fusion_attention", "heads_do_not_group", lambda: attention(key=randn(2, 3, 6, 8), value=randn(2, 3, 6, 8)), "no multiple of 3"),
    ("npu_fusion_attention", "wider_value", lambda: attention(value=randn(2, 2, 6, 9)), "Dq = Dk >= Dv"),
    ("npu_fusion_attention", "widths", lambda: attention(key=randn(2, 2, 6, 7), value=randn(2, 2, 6, 7)), "Dq = Dk >= Dv"),
    ("npu_fusion_attention", "batches", lambda: attention(key=randn(3, 2, 6, 8), value=randn(3, 2, 6, 8)), "one batch size"),
    ("npu_fusion_attention", "keys_and_values", lambda: attention(value=randn(2, 2, 7, 8)), "may differ in"),
    ("npu_fusion_attention", "keep_prob_range", lambda: attention(keep_prob=1.5), "keep_prob must be"),
    ("npu_fusion_attention", "keep_prob_zero", lambda: attention(keep_prob=0.0), "keep_prob must be"),
    ("npu_fusion_attention", "no_lengths", lambda: packed(actual_seq_qlen=None), "needs actual_seq_qlen"),
    ("npu_fusion_attention", "falling_lengths", lambda: packed(actual_seq_qlen=[4, 2]), "must not fall"),
    ("npu_fusion_attention", "lengths_past_the_end", lambda: packed(actual_seq_qlen=[2, 7]), "but there are 6"),
    ("npu_fusion_attention", "numbers_of_lengths", lambda: packed(actual_seq_kvlen=[6]), "must have one length"),
    ("npu_fusion_attention", "packed_mask_too_small", lambda: packed(atten_mask=torch.zeros(3, 3).bool()), "longest query"),
    ("npu_fusion_attention", "wide_heads", lambda: attention(**{n: randn(2, 4, 5, 769) for n in ("query", "key", "value")}), "at most 768"),
    ("npu_fusion_attention", "band_without_keys", lambda: attention(atten_mask=TRIANGLE, sparse_mode=4, pre_tockens=1, next_tockens=-3), "needs keys between"),
    ("npu_fusion_attention", "packed_row_without_keys", lambda: packed(atten_mask=torch.eye(4).bool() | (torch.arange(4) == 1)[:, None]), "shows every row a key"),
    ("npu_fusion_attention_grad", "no_statistics", lambda: attention_grad(softmax_sum=None), "are required"),
    ("npu_fusion_attention_grad", "gradient_shape", lambda: attention_grad(dy=randn(2, 4, 6, 8)), "must have one shape"),
    ("npu_fusion_attention_grad", "statistics_shape", lambda: attention_grad(softmax_max=randn(2, 4, 5, 1)), "softmax_max"),
    ("npu_rms_norm", "gamma_shape", lambda: npu.npu_rms_norm(randn(2, 4), randn(3)), "must equal input's last dimensions"),
    ("npu_rms_norm", "gamma_dtype", lambda: npu.npu_rms_norm(randn(2, 4), randn(4).float()), "must have input's dtype"),
    ("npu_rms_norm", "whole_numbers", lambda: npu.npu_rms_norm(torch.ones(2, 4).int(), torch.ones(4).int()), "must be floating"),
    ("npu_rms_norm_backward", "gradient_shape", lambda: npu.npu_rms_norm_backward(randn(2, 3), randn(2, 4), randn(4), randn(2, 1)), "dy"),
    ("npu_rms_norm_backward", "rstd_shape", lambda: npu.npu_rms_norm_backward(randn(2, 4), randn(2, 4), randn(4), randn(2)), "rstd"),
    ("npu_swiglu", "odd", lambda: npu.npu_swiglu(randn(2, 5)), "must be even"),
    ("npu_swiglu", "dim", lambda: npu.npu_swiglu(randn(2, 4), dim=2), "must be even"),
    ("npu_swiglu", "whole_numbers", lambda: npu.npu_swiglu(torch.ones(2, 4).int()), "must be floating"),
    ("npu_swiglu_backward", "odd", lambda: npu.npu_swiglu_backward(randn(2, 2), randn(2, 5)), "must be even"),
    ("npu_swiglu_backward", "gradient_shape", lambda: npu.npu_swiglu_backward(randn(2, 3), randn(2, 4)), "grad_output"),
    ("npu_grouped_matmul", "short_list", lambda: grouped(group_list=torch.tensor([2, 0, 2])), "covers 4 of 5"),
    ("npu_grouped_matmul", "long_list", lambda: grouped(group_list=torch.tensor([2, 0, 4])), "covers 6 of 5"),
    ("npu_grouped_matmul", "negative", lambda: grouped(group_list=torch.tensor([6, -4, 3])), "negative group"),
    ("npu_grouped_matmul", "counts_as_totals", lambda: grouped(group_list_type=0), "negative group"),
    ("npu_grouped_matmul", "dtypes", lambda: grouped(weight=[randn(3, 4, 6).float()]), "one dtype"),
    ("npu_grouped_matmul", "sizes", lambda: grouped(weight=[randn(3, 5, 6)]), "do not multiply"),
    ("npu_grouped_matmul", "weights", lambda: grouped(weight=[randn(2, 4, 6)]), "2 weights for 3 groups"),
    ("npu_grouped_matmul", "list_dtype", lambda: grouped(group_list=torch.tensor([2, 0, 3]).int()), "must be int64"),
    ("npu_grouped_matmul", "no_type", lambda: grouped(group_type=None), "only supports -1, 0 and 2"),
    ("npu_grouped_matmul", "biases", lambda: grouped(bias=[randn(6)]), "1 biases for 3 weights"),
    ("npu_grouped_matmul", "whole_numbers", lambda: grouped(x=[torch.ones(5, 4).int()], weight=[torch.ones(3, 4, 6).int()]), "must be floating"),
    ("npu_grouped_matmul", "bias_of_bfloat16", lambda: grouped(x=[half(5, 4)], weight=[half(3, 4, 6)], bias=[half(6)] * 3), "must be torch.float32"),
    ("npu_grouped_matmul", "bias_width", lambda: grouped(bias=[randn(1)] * 3), "bias must have 6 numbers"),
    ("npu_grouped_matmul", "split_of_a_tensor", lambda: grouped(split_item=1), "takes split_item 2 or 3"),
    ("npu_grouped_matmul", "type_of_a_list", lambda: grouped(group_list=[2, 2, 5], group_list_type=0), "takes no group_type"),
    ("npu_grouped_matmul", "kind_of_a_list", lambda: grouped(group_list=[2, 2, 5], group_type=None), "takes no group_list_type"),
    ("npu_grouped_matmul", "rank", lambda: grouped(x=[randn(5)]), "single 2-D x"),
    ("npu_moe_token_permute", "rank", lambda: npu.npu_moe_token_permute(randn(3, 2, 2), INDICES), "2 dimensions"),
    ("npu_moe_token_permute", "lengths", lambda: npu.npu_moe_token_permute(randn(4, 2), INDICES), "3 rows of indices"),
    ("npu_moe_token_permute", "index_dtype", lambda: npu.npu_moe_token_permute(randn(3, 2), INDICES.float()), "int32 or int64"),
    ("npu_moe_token_permute", "index_rank", lambda: npu.npu_moe_token_permute(randn(3, 2), INDICES[None]), "1 or 2 dimensions"),
    ("npu_moe_token_permute", "too_many_rows", lambda: npu.npu_moe_token_permute(randn(3, 2), INDICES, 7), "num_out_tokens"),
    ("npu_moe_token_permute", "negative_expert", lambda: npu.npu_moe_token_permute(randn(3, 2), INDICES - 1), "must not be negative"),
    ("npu_moe_token_permute", "whole_numbers", lambda: npu.npu_moe_token_permute(torch.ones(3, 2).int(), INDICES), "must be floating"),
    ("npu_moe_token_permute_grad", "rows", lambda: npu.npu_moe_token_permute_grad(randn(3, 2), randn(6, 2), INDICES, ORDER[:5]), "sorted_indices"),
    ("npu_moe_token_unpermute", "probs_rank", lambda: npu.npu_moe_token_unpermute(randn(6, 2), ORDER, randn(6)), "2 dimensions"),
    ("npu_moe_token_unpermute", "probs_size", lambda: npu.npu_moe_token_unpermute(randn(6, 2), ORDER, randn(2, 2)), "for 6 indices"),
    ("npu_moe_token_unpermute", "order_rank", lambda: npu.npu_moe_token_unpermute(randn(6, 2), ORDER[None]), "1 dimension"),
    ("npu_moe_token_unpermute", "place_twice", lambda: npu.npu_moe_token_unpermute(randn(3, 2), torch.tensor([0, 0, 2]).int()), "each place"),
    ("npu_moe_token_unpermute", "place_past_the_end", lambda: npu.npu_moe_token_unpermute(randn(3, 2), torch.tensor([0, 1, 99]).int()), "each place"),
    ("npu_moe_token_unpermute", "negative_place", lambda: npu.npu_moe_token_unpermute(randn(3, 2), torch.tensor([0, 1, -1]).int()), "each place"),
    ("npu_moe_token_unpermute", "order_dtype", lambda: npu.npu_moe_token_unpermute(randn(6, 2), ORDER.float()), "must be int32"),
    ("npu_moe_token_unpermute", "rank", lambda: npu.npu_moe_token_unpermute(randn(6), ORDER), "permuted_tokens"),
    ("npu_moe_token_unpermute_grad", "probs_size", lambda: npu.npu_moe_token_unpermute_grad(randn(6, 2), randn(3, 2), ORDER, randn(2, 2)), "for 6 indices"),
    ("npu_moe_token_unpermute_grad", "gradient_shape", lambda: npu.npu_moe_token_unpermute_grad(randn(6, 2), randn(4, 2), ORDER, randn(3, 2)), "grad_unpermuted_tokens"),
    ("npu_moe_token_permute_with_routing_map", "map_dtype", lambda: by_map(routing_map=torch.ones(4, 3)), "bool or int8"),
    ("npu_moe_token_permute_with_routing_map", "uneven", lambda: by_map(routing_map=torch.ones(4, 3).triu().bool(), num_out_tokens=6), "the same number of experts"),
    ("npu_moe_token_permute_with_routing_map", "rows", lambda: by_map(num_out_tokens=7), "the same number of experts"),
    ("npu_moe_token_permute_with_routing_map", "lengths", lambda: by_map(tokens=randn(5, 3)), "5 tokens, routing_map for 4"),
    ("npu_moe_token_permute_with_routing_map", "probs_shape", lambda: by_map(probs=randn(4, 2)), "routing_map's shape"),
    ("npu_moe_token_permute_with_routing_map", "probs_dtype", lambda: by_map(probs=randn(4, 3).float()), "tokens' dtype"),
    ("npu_moe_token_permute_with_routing_map", "capacity", lambda: by_map(num_out_tokens=15, drop_and_pad=True), "capacity 5 exceeds"),
    ("npu_moe_token_permute_with_routing_map", "capacity_does_not_divide", lambda: by_map(num_out_tokens=7, drop_and_pad=True), "does not divide"),
    ("npu_moe_token_permute_with_routing_map_grad", "rows", lambda: npu.npu_moe_token_permute_with_routing_map_grad(randn(8, 3), None, torch.arange(7).int(), torch.ones(4, 2).bool(), 2, 4, False), "the same number of experts"),
    ("npu_moe_token_unpermute_with_routing_map", "lengths", lambda: back_by_map(permuted_tokens=randn(7, 3)), "differ in length"),
    ("npu_moe_token_unpermute_with_routing_map", "shape", lambda: back_by_map(restore_shape=[4]), "restore_shape"),
    ("npu_moe_token_unpermute_with_routing_map", "hidden_size", lambda: back_by_map(restore_shape=[4, 7]), "restore_shape must be"),
    ("npu_moe_token_unpermute_with_routing_map", "probs_without_map", lambda: back_by_map(probs=randn(4, 3)), "need routing_map"),
    ("npu_moe_token_unpermute_with_routing_map", "map_and_rows", lambda: back_by_map(probs=randn(4, 3), routing_map=torch.ones(4, 3).bool()), "selects 12 probs"),
    ("npu_moe_token_unpermute_with_routing_map_grad", "no_rows", lambda: npu.npu_moe_token_unpermute_with_routing_map_grad(randn(3, 3), ORDER, ORDER, None, None, randn(3, 3), False, [3, 3]), "need permuted_tokens"),
    ("npu_rotary_mul", "odd", lambda: npu.npu_rotary_mul(randn(1, 2, 3, 5), randn(1, 1, 1, 5), randn(1, 1, 1, 5)), "must be even"),
    ("npu_rotary_mul", "rank", lambda: npu.npu_rotary_mul(randn(2, 3, 4), randn(1, 1, 4), randn(1, 1, 4)), "4 dimensions"),
    ("npu_rotary_mul", "tables", lambda: npu.npu_rotary_mul(randn(1, 2, 3, 4), randn(1, 1, 1, 4), randn(1, 2, 1, 4)), "one shape"),
    ("npu_rotary_mul", "broadcast", lambda: npu.npu_rotary_mul(randn(1, 2, 3, 4), randn(1, 5, 1, 4), randn(1, 5, 1, 4)), "must broadcast"),
    ("npu_rotary_mul", "dtypes", lambda: npu.npu_rotary_mul(randn(1, 2, 3, 4), randn(1, 1, 1, 4).float(), randn(1, 1, 1, 4).float()), "one dtype"),
    ("npu_rotary_mul", "whole_numbers", lambda: rotary(torch.ones(1, 2, 3, 4).int(), 1, 1, 1, 4), "must be floating"),
    ("npu_rotary_mul", "wide_heads", lambda: rotary(randn(1, 1, 1, 896), 1, 1, 1, 896), "below 896"),
    ("npu_rotary_mul", "full_tables_of_neighbours", lambda: rotary(randn(2, 3, 4, 8), 2, 3, 4, 8, mode="interleave"), "none of interleave's forms"),
    ("npu_rotary_mul", "one_table_for_all", lambda: rotary(randn(2, 3, 4, 8), 1, 1, 1, 8), "none of half's forms"),
    ("npu_rotary_mul_backward", "gradient_shape", lambda: npu.npu_rotary_mul_backward(randn(1, 2, 3, 2), randn(1, 2, 3, 4), randn(1, 1, 1, 4), randn(1, 1, 1, 4)), "grad"),
    ("npu_scaled_masked_softmax", "size", lambda: softmax(randn(1, 1, 31, 32), torch.zeros(1, 1, 31, 32).bool()), "multiples of 32"),
    ("npu_scaled_masked_softmax", "mask_dtype", lambda: softmax(randn(1, 1, 32, 32), torch.zeros(1, 1, 32, 32)), "must be bool"),
    ("npu_scaled_masked_softmax_backward", "mask", lambda: npu.npu_scaled_masked_softmax_backward(randn(1, 1, 32, 32), randn(1, 1, 32, 32), torch.zeros(1, 1, 16, 32).bool(), 1.0, False), "must broadcast"),
    ("npu_all_gather_base_mm", "world_size", lambda: gather(world_size=4), "the group has 2 ranks"),
    ("npu_all_gather_base_mm", "rank", lambda: gather(half(2, 2, 3), half(3, 4)), "2 dimensions"),
    ("npu_all_gather_base_mm", "whole_numbers", lambda: gather(torch.ones(2, 3).int(), torch.ones(3, 4).int()), "float16 or bfloat16"),
    ("npu_all_gather_base_mm", "float64", lambda: gather(randn(2, 3), randn(3, 4)), "float16 or bfloat16"),
    ("npu_all_gather_base_mm", "transposed", lambda: gather(half(3, 2).T, half(3, 4)), "must not be transposed"),
    ("npu_all_gather_base_mm", "contraction", lambda: gather(half(1, 65535), half(65535, 1)), "below 65535"),
    ("npu_mm_reduce_scatter_base", "rows", lambda: scatter(half(3, 3), half(3, 4)), "do not split over 2"),
    ("npu_mm_reduce_scatter_base", "sizes", lambda: scatter(half(4, 3), half(4, 4)), "do not multiply"),
    ("npu_mm_reduce_scatter_base", "dtypes", lambda: scatter(half(4, 3), half(3, 4).float()), "one dtype"),
    ("npu_mm_reduce_scatter_base", "transposed", lambda: scatter(half(3, 4).T, half(3, 4)), "must not be transposed"),
    ("npu_mm_reduce_scatter_base", "contraction", lambda: scatter(half(2, 65535), half(65535, 1)), "below 65535"),
    ("npu_mm_all_reduce_base", "dtypes", lambda: reduce(half(4, 3), half(3, 4).float()), "one dtype"),
    ("npu_mm_all_reduce_base", "bias", lambda: reduce(half(4, 3), half(3, 4), half(3)), "bias must have 4 numbers"),
    ("npu_mm_all_reduce_base", "bias_dtype", lambda: reduce(half(4, 3), half(3, 4), half(4).float()), "bias must have the operands"),
    ("npu_mm_all_reduce_base", "empty", lambda: reduce(half(0, 3), half(3, 4)), "must not be empty"),
    ("npu_mm_all_reduce_base", "rank", lambda: reduce(half(1, 1, 4, 3), half(3, 4)), "2 or 3 and 2 dimensions"),
    ("npu_mm_all_reduce_base", "transposed", lambda: reduce(half(3, 4).T, half(3, 4)), "must not be transposed"),
    ("npu_apply_adam_w", "states", lambda: adam(out=[randn(4), randn(4)]), "got 2 tensors"),
    ("npu_apply_adam_w", "no_maximum", lambda: adam(amsgrad=True), "amsgrad needs max_grad_norm"),
    ("npu_apply_adam_w", "whole_numbers", lambda: adam(grad=torch.ones(4).int(), out=[torch.ones(4).int()] * 3), "must be floating"),
    ("npu_apply_adam_w", "dtypes", lambda: adam(grad=half(4)), "one dtype"),
    ("npu_apply_adam_w", "maximum", lambda: adam(amsgrad=True, max_grad_norm=randn(1)), "max_grad_norm must be as grad"),
    ("npu_apply_adam_w", "shapes", lambda: adam(grad=randn(1)), "must have one shape"),
]  # fmt: skip
#: Operators that allocate, cast or tell a format: what they refuse is in their own tests.
NO_NUMBERS = {
    "empty_with_swapped_memory",
    "get_npu_format",
    "npu_dtype_cast",
    "npu_dtype_cast_backward",
    "npu_format_cast",
    "_npu_moe_token_unpermute_with_routing_map",  # what the public one calls
}


@pytest.fixture(autouse=True)
def pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks as far as a refusal can see; talking to them would fail."""

    class Group(SimpleNamespace):
        def size(self) -> int:
            return 2

    monkeypatch.setattr(ops.mc2, "_group", lambda _: Group())


@pytest.mark.parametrize(
    ("op", "call", "words"), [(o, c, w) for o, _, c, w in REFUSALS], ids=[f"{o}-{n}" for o, n, _, _ in REFUSALS]
)
def test_what_the_vendor_forbids(op: str, call: Call, words: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        call()
    message = str(raised.value)
    assert message.startswith(f"{op}: "), message
    assert words in message, message
    assert message.rstrip().endswith(".") or "only supports" in message, "a sentence"


def test_every_operator_that_computes_refuses_something() -> None:
    named = {s.split("(")[0].split(".")[0] for s in ops.schemas.SCHEMAS}
    assert named - NO_NUMBERS == {op for op, *_ in REFUSALS}


@pytest.mark.parametrize(
    "call", [attention, attention_grad, packed, grouped, by_map, back_by_map, adam], ids=lambda c: c.__name__
)
def test_the_calls_are_right_but_for_the_change(call: Call) -> None:
    """Without it they go through, so that what is refused is the change."""
    outputs = call()
    first = outputs if isinstance(outputs, Tensor) else outputs[0]
    assert math.isfinite(float(first.sum()))
