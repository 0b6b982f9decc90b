"""Every planted fault is caught by its family, in the quantity that names it; without a fault the same cases pass."""

# ruff: noqa: E501 - the tables have one fault a line

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from operators_mutants import Mutant, MutantJob, explored, planted
from test_npu_ops_support import ops

from conformance.npu.kernels import kernels
from conformance.operators import COLLECTIVE, FAMILIES, Family
from conformance.operators.profiles import Explored, OperatorSpec, Profile
from conformance.operators.surface import Surface
from conformance.ranks import Job, RankServer

pytestmark = pytest.mark.stack

SURFACE = Surface("cpu", kernels(ops))
F, B = "fusion_attention", "fusion_attention_backward"

MUTANTS = [
    # Attention: which keys a query sees.
    Mutant("mask_off_by_one", F, "_attention_shapes.outside_band", "(j > i + after)", "(j > i + after + 1)", "output"),
    Mutant("mask_off_by_one_below", F, "_attention_shapes.outside_band", "(j < i - before)", "(j < i - before + 1)", "output"),
    Mutant("mode_2_aligned_right", F, "_attention_shapes.Masking._compressed", "unlimited, 0, 0)", "unlimited, 0, columns - rows)", "output"),
    Mutant("mode_3_aligned_left", F, "_attention_shapes.Masking._compressed", "unlimited, 0, shift)", "unlimited, 0, 0)", "output"),
    Mutant("mode_4_aligned_left", F, "_attention_shapes.Masking._compressed", "self.after, shift)", "self.after, 0)", "output"),
    Mutant("mode_4_sides_swapped", F, "_attention_shapes.Masking._compressed", "self.before, self.after", "self.after, self.before", "output"),
    Mutant("mask_inverted", F, "_attention_shapes.Masking._explicit", "return forbidden", "return ~forbidden", "output"),
    Mutant("packed_mask_cut_at_the_end", F, "_attention_shapes.Masking.packed", "self.mask[:rows, :columns]", "self.mask[-rows:, -columns:]", "output"),
    Mutant("packed_mask_forgotten", F, "attention.fusion_attention", "masking.packed(q.shape[2], k.shape[2])", "None", "output"),
    # Attention: heads, scale, numbers.
    Mutant("heads_grouped_in_turn", F, "_attention_math.expand_heads", "tensor.repeat_interleave(heads // tensor.shape[1], 1)", "tensor.repeat(1, heads // tensor.shape[1], 1, 1)", "output"),
    Mutant("scale_missing", F, "_attention_math._scores", " * scale", "", "output"),
    Mutant("scale_twice", F, "_attention_math._scores", "* scale", "* scale * scale", "output"),
    Mutant("scores_in_bfloat16", F, "_attention_math._scores", "(wide(q) @", "(q.bfloat16().float() @", "output"),
    Mutant("not_normalised", F, "_attention_math.attend", "torch.where(total == 0, 1.0, total)", "1.0", "output"),
    Mutant("masked_rows_give_nan", F, "_attention_math.attend", "torch.where(total == 0, 1.0, total)", "total", "output"),
    Mutant("output_in_bfloat16", F, "_attention_math.attend", "(probabilities @", "(probabilities.bfloat16().float() @", "output"),
    Mutant("layout_transposed", F, "_attention_shapes.from_bnsd", 'if layout == "BSND" else tensor).contiguous()', 'if layout == "BSND" else tensor).contiguous().flip(1)', "output"),
    # Attention: statistics and packing.
    Mutant("statistics_layout", F, "attention._pack", "statistic[0].reshape(-1, 1)", "statistic[0].transpose(0, 1).reshape(-1, 1)", "softmax"),
    Mutant("statistics_at_the_end", F, "attention._pack", "part.query.start * heads : part.query.stop * heads", "len(into) - rows.shape[0] : len(into)", "softmax"),
    Mutant("maximum_of_visible_and_hidden", F, "_attention_math.attend", "top = scores.amax(-1, keepdim=True) if", "top = 1 + scores.amax(-1, keepdim=True) if", "softmax maximum"),
    Mutant("sum_is_its_logarithm", F, "_attention_math.attend", "top, total\n", "top, total.log()\n", "softmax sum"),
    Mutant("leading_zero_ends_the_batch", F, "_attention_shapes.sequences", "if end_q == 0 and end_kv == 0 and (start_q or start_kv)", "if end_q == 0", "output"),
    Mutant("keys_of_the_member_before", F, "_attention_shapes.sequences", "slice(start_kv, end_kv)", "slice(0, end_kv)", "output"),
    Mutant("tail_joins_the_last_member", F, "_attention_shapes.sequences", "start_q, start_kv = end_q, end_kv", "start_q, start_kv = end_q, start_kv", "output"),
    # Attention's gradient.
    Mutant("correction_missing", B, "_attention_math.attend_backward", "- correction)", ")", "gradient"),
    Mutant("gradient_without_scale", B, "_attention_math.attend_backward", "- correction) * scale", "- correction)", "gradient"),
    Mutant("head_gradients_not_summed", B, "_attention_math._sum_heads", ".sum(2)", "[:, :, 0]", "gradient"),
    Mutant("head_gradients_averaged", B, "_attention_math._sum_heads", ".sum(2)", ".mean(2)", "gradient"),
    Mutant("head_gradients_interleaved", B, "_attention_math._sum_heads", "grad.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(2)", "grad.reshape(batch, heads // kv_heads, kv_heads, *rest).sum(1)", "gradient"),
    Mutant("mask_dropped_in_backward", B, "_attention_math.attend_backward", "total == 0 if mask is None else mask | (total == 0)", "total == 0", "gradient"),
    Mutant("block_statistics_in_backward", B, "_attention_math.attend_backward", "torch.exp(_scores(q, k, scale) - top) / total", "torch.softmax(_scores(q, k, scale) if mask is None else _scores(q, k, scale).masked_fill(mask, -1e30), -1)", "blocks"),
    Mutant("statistics_read_by_token", B, "attention._unpack", "rows.view(1, heads, -1, STATISTIC_WIDTH)", "rows.view(1, -1, heads, STATISTIC_WIDTH).transpose(1, 2)", "gradient"),
    # RMS norm.
    Mutant("epsilon_ignored", "rms_norm", "norm.rms_norm", " + epsilon)", ")", "output"),
    Mutant("epsilon_outside_the_root", "rms_norm", "norm.rms_norm", "keepdim=True) + epsilon)", "keepdim=True)) / (1 + epsilon)", "output"),
    Mutant("mean_removed", "rms_norm", "norm.rms_norm", "x = wide(input)", "x = wide(input) - wide(input).mean(-1, keepdim=True)", "output"),
    Mutant("gamma_plus_one", "rms_norm", "norm.rms_norm", "* wide(gamma))", "* (1 + wide(gamma)))", "output"),
    Mutant("rstd_is_rms", "rms_norm", "norm.rms_norm", ".to(input.dtype), rstd", ".to(input.dtype), 1 / rstd", "rstd"),
    Mutant("one_dimension_normed", "rms_norm", "norm._trailing", "-gamma.dim()", "-1", ""),
    Mutant("norm_accumulated_in_bfloat16", "rms_norm", "norm.rms_norm", "x.pow(2)", "x.bfloat16().pow(2)", "rstd"),
    Mutant("norm_projection_missing", "rms_norm", "norm.rms_norm_backward", "- normed * (scaled * normed).mean(_trailing(gamma), keepdim=True)", "", "gradient of input"),
    Mutant("gamma_gradient_averaged", "rms_norm", "norm.rms_norm_backward", "*gamma.shape).sum(0)", "*gamma.shape).mean(0)", "gradient of gamma"),
    # SwiGLU.
    Mutant("halves_swapped", "swiglu", "activation._halves", "return gate, linear", "return linear, gate", "output"),
    Mutant("gelu_for_silu", "swiglu", "activation.swiglu", "torch.nn.functional.silu(gate)", "torch.nn.functional.gelu(gate)", "output"),
    Mutant("derivative_of_sigmoid", "swiglu", "activation.swiglu_backward", "(1 + gate * (1 - sigmoid))", "gate * (1 - sigmoid)", "gradient"),
    Mutant("gradient_halves_swapped", "swiglu", "activation.swiglu_backward", "(dgate, grad * gate * sigmoid)", "(grad * gate * sigmoid, dgate)", "gradient"),
    # MoE.
    Mutant("sort_by_choice", "moe_permute", "moe.token_permute", "indices.reshape(-1)", "indices.reshape(-1).flip(0)", "permuted tokens"),
    Mutant("ties_unstable", "moe_permute", "moe.token_permute", "torch.argsort(indices.reshape(-1), stable=True)", "torch.argsort(indices.reshape(-1).flip(0), stable=True).neg() + indices.numel() - 1", "permuted tokens"),
    Mutant("drops_the_first_rows", "moe_permute", "moe.token_permute", "order[: num_out_tokens or None]", "order[-(num_out_tokens or 0) :]", "permuted tokens"),
    Mutant("order_not_inverted", "moe_permute", "moe.invert", "inverse[order] = torch.arange(order.numel(), dtype=torch.int32)", "inverse = order.to(torch.int32)", "sorted indices"),
    Mutant("experts_in_reverse", "moe_permute", "moe_routing_map.permute_with_routing_map", "routing_map.bool().T.nonzero()[:, 1]", "routing_map.bool().flip(1).T.nonzero()[:, 1]", "permuted tokens"),
    Mutant("probs_by_token", "moe_permute", "moe_routing_map.select_probs", "values.T.masked_select(routing_map.bool().T)", "values.masked_select(routing_map.bool())", "permuted probs"),
    Mutant("probs_gradient_dropped", "moe_permute", "moe_routing_map.scatter_probs", ".masked_scatter(routing_map.bool().T, values)", "", "gradient of probs"),
    Mutant("copies_not_summed", "moe_permute", "moe_routing_map.permute_with_routing_map_grad", "collect(grad, sorted_indices, choices).sum(1)", "collect(grad, sorted_indices, choices)[:, :1].sum(1)", "gradient of tokens"),
    Mutant("capacity_from_the_end", "moe_permute", "moe_routing_map.permute_with_routing_map", "by_need[:, :capacity]", "by_need[:, by_need.shape[1] - capacity :]", "permuted tokens"),
    Mutant("capacity_overwrites", "moe_permute", "moe_routing_map.permute_with_routing_map_grad", ".index_add_(0, at, wide(grad))", ".index_copy_(0, at, wide(grad))", "gradient of tokens"),
    Mutant("weights_forgotten", "moe_unpermute", "moe.token_unpermute", "rows * wide(probs)[..., None]", "rows", "output"),
    Mutant("average_for_sum", "moe_unpermute", "moe.token_unpermute", "weighted.sum(1)", "weighted.mean(1)", "output"),
    Mutant("dropped_rows_come_back", "moe_permute", "moe.collect", "picked * kept[:, None]", "picked", "gradient of tokens"),
    Mutant("probs_gradient_of_one_column", "moe_unpermute", "moe.token_unpermute_grad", "* grad).sum(-1)", "* grad)[..., 0]", "gradient of probs"),
    Mutant("map_weights_forgotten", "moe_unpermute", "moe_routing_map.unpermute_with_routing_map", "rows = rows * wide(picked)[:, None]\n    tokens", "tokens", "output"),
    Mutant("map_probs_gradient_in_row_order", "moe_unpermute", "moe_routing_map.unpermute_with_routing_map_grad", "scatter_probs(expert_order, routing_map)", "scatter_probs(expert_order.flip(0), routing_map)", "gradient of probs"),
    Mutant("int32_indices_backwards", "moe_permute", "moe.token_permute", "torch.argsort(indices.reshape(-1), stable=True)", "torch.argsort(indices.reshape(-1) if indices.dtype == torch.int64 else -indices.reshape(-1), stable=True)", "permuted tokens"),
    Mutant("int8_map_backwards", "moe_permute", "moe_routing_map.permute_with_routing_map", "routing_map.bool().T.nonzero()[:, 1]", "(routing_map if routing_map.dtype == torch.bool else routing_map.flip(1)).bool().T.nonzero()[:, 1]", "permuted tokens"),
    Mutant("negative_number_keeps_all", "moe_permute", "moe.token_permute", "order[: num_out_tokens or None]", "order[: max(num_out_tokens or 0, 0) or None]", ""),
    Mutant("places_modulo_64", "moe_permute", "moe.invert", "torch.arange(order.numel(), dtype=torch.int32)", "torch.arange(order.numel(), dtype=torch.int32) % 64", "sorted indices"),
    Mutant("map_stops_at_512_rows", "moe_unpermute", "moe_routing_map.unpermute_with_routing_map", "out = collect(rows, sorted_indices", "out = collect(rows * (torch.arange(len(rows)) < 512)[:, None], sorted_indices", "output"),
    # Grouped products.
    Mutant("totals_taken_for_counts", "grouped_matmul", "grouped_matmul._bounds", "bounds[-1] + entry if group_list_type == 1 else entry", "bounds[-1] + entry", "RuntimeError"),
    Mutant("experts_reversed", "grouped_matmul", "grouped_matmul._rows", "zip(pairwise(bounds), experts, biases", "zip(pairwise(bounds), experts[::-1], biases", "output"),
    Mutant("next_expert", "grouped_matmul", "grouped_matmul._rows", "zip(pairwise(bounds), experts, biases", "zip(pairwise(bounds), [*experts[1:], experts[0]], biases", "output"),
    Mutant("bias_of_the_first", "grouped_matmul", "grouped_matmul._rows", "experts, biases, strict", "experts, [biases[0]] * len(biases), strict", "output"),
    Mutant("products_in_bfloat16", "grouped_matmul", "grouped_matmul._matmul", "wide(left) @ wide(right)", "(left.bfloat16() @ right.bfloat16()).to(wide(left).dtype)", "output"),
    Mutant("contraction_one_short", "grouped_matmul", "grouped_matmul._contraction", "x[:, a:b], weight[a:b]", "x[:, a:b - 1], weight[a:b - 1]", "output"),
    Mutant("accumulator_overwritten", "grouped_matmul", "kernels.GroupMatmulAdd.npu_groupmatmul_add_fp32", "by_group[group] += x", "by_group[group] = x", "accumulated"),
    Mutant("groups_want_rows", "grouped_matmul", "grouped_matmul._contraction", "require(x.shape[1] == weight.shape[0], OP", "require(len(weight) > 0, OP, 'no rows.'); require(x.shape[1] == weight.shape[0], OP", "no rows"),
    # Rotary embedding.
    Mutant("turned_the_other_way", "rotary", "rotary._rotate", "torch.cat((-second, first), -1)", "torch.cat((second, -first), -1)", "output"),
    Mutant("neighbours_turned_the_other_way", "rotary", "rotary._rotate", "(-x[..., 1::2], x[..., ::2])", "(x[..., 1::2], -x[..., ::2])", "output"),
    Mutant("interleave_takes_halves", "rotary", "rotary._rotate", 'if mode == "half"', "if mode", "output"),
    Mutant("gradient_not_turned_back", "rotary", "rotary.rotary_mul_backward", "wide(r1) - _rotate", "wide(r1) + _rotate", "gradient of input"),
    Mutant("tables_gradient_not_summed", "rotary", "rotary.rotary_mul_backward", "dr2 = (g * _rotate(x, rotary_mode))", "dr2 = (g * x)", "gradient of r2"),
    Mutant("kernel_modes_swapped", "rotary", "kernels.RotaryPositionEmbedding.npu_rotary_position_embedding", '{0: "half", 1: "interleave"}', '{1: "half", 0: "interleave"}', "output"),
    # AdamW.
    Mutant("decay_coupled", "fused_adamw", "optimizer.adamw_step", "p = wide(param) * (1 - lr * weight_decay)", "p = wide(param); g = g + weight_decay * p", "moment"),
    Mutant("powers_of_the_update_before", "fused_adamw", "optimizer.apply_adam_w_out", "(beta1_power * beta1, beta2_power * beta2)", "(beta1_power * beta1, beta2_power or beta2)", ""),
    Mutant("no_bias_correction", "fused_adamw", "optimizer.adamw_step", "(lr / (1 - powers[0]))", "lr", "parameter"),
    Mutant("epsilon_before_the_correction", "fused_adamw", "optimizer.adamw_step", "v.sqrt() / math.sqrt(1 - powers[1]) + eps", "(v.sqrt() + eps) / math.sqrt(1 - powers[1])", "parameter"),
    Mutant("betas_swapped", "fused_adamw", "optimizer.adamw_step", "wide(moment) * betas[0] + g * (1 - betas[0])", "wide(moment) * betas[1] + g * (1 - betas[1])", "moment"),
    Mutant("maximize_ignored", "fused_adamw", "optimizer.adamw_step", "-wide(grad) if maximize else wide(grad)", "wide(grad)", "moment"),
    Mutant("amsgrad_forgets", "fused_adamw", "optimizer.adamw_step", "v = torch.maximum(wide(square_max), v)", "pass", "parameter"),
    Mutant("kernel_counts_from_zero", "fused_adamw", "kernels.FusedAdamWV2.npu_apply_fused_adamw_v2", "step = float(state_step)", "step = float(state_step) + 1", "parameter"),
    Mutant("strided_parameter_not_written", "fused_adamw", "optimizer.adamw_step", "param.copy_(p -", "(param if param.is_contiguous() else param.clone()).copy_(p -", "parameter"),
    Mutant("largest_square_not_kept", "fused_adamw", "optimizer.adamw_step", "square_max.copy_(v)", "pass", "parameter"),
    # Dtypes of outputs, and of what backward operators give by themselves: autograd casts gradients.
    Mutant("swiglu_gives_float32", "swiglu", "activation.swiglu", ".to(input.dtype)", "", "output: dtype torch.float32"),
    Mutant("rms_norm_gives_float32", "rms_norm", "norm.rms_norm", ".to(input.dtype), rstd", ", rstd", "output: dtype torch.float32"),
    Mutant("rotary_gives_float32", "rotary", "rotary.rotary_mul", ".to(input.dtype)", "", "output: dtype torch.float32"),
    Mutant("unpermute_gives_float32", "moe_unpermute", "moe.token_unpermute", ".to(permuted_tokens.dtype)", "", "output: dtype torch.float32"),
    Mutant("swiglu_backward_gives_float32", "swiglu", "activation.swiglu_backward", ".to(input.dtype)", "", "gradient of input from the backward operator: dtype torch.float32"),
    Mutant("rms_norm_backward_gives_float32", "rms_norm", "norm.rms_norm_backward", "dx.to(input.dtype)", "dx", "gradient of input from the backward operator: dtype torch.float32"),
    Mutant("gamma_gradient_rounded", "rms_norm", "norm.rms_norm_backward", ".sum(0)", ".sum(0).to(input.dtype)", "gradient of gamma from the backward operator: dtype torch.bfloat16"),
    Mutant("rotary_backward_gives_float32", "rotary", "rotary.rotary_mul_backward", "dr1.to(r1.dtype)", "dr1", "gradient of r1 from the backward operator: dtype torch.float32"),
    Mutant("unpermute_backward_gives_float32", "moe_unpermute", "moe.token_unpermute_grad", ".to(probs.dtype)", "", "gradient of probs from the backward operator: dtype torch.float32"),
    Mutant("unpermute_map_backward_gives_float32", "moe_unpermute", "moe_routing_map.unpermute_with_routing_map_grad", "dprobs.to(probs.dtype)", "dprobs", "gradient of probs from the backward operator: dtype torch.float32"),
    Mutant("permute_backward_gives_float32", "moe_permute", "moe.token_permute_grad", ".to(tokens.dtype)", "", "gradient of tokens from the backward operator: dtype torch.float32"),
    Mutant("attention_backward_gives_float32", B, "_attention_math.attend_backward", "dq.to(q.dtype)", "dq", "gradient of query from the backward operator: dtype torch.float32"),
    # Long members, wide heads, members without queries.
    Mutant("long_and_grouped", F, "_attention_math.attend", "scores = _scores(q, k, scale)", "scores = _scores(q, k, scale) * (0 if k.shape[2] > 64 and k.shape[1] != q.shape[1] else 1)", "output"),
    Mutant("long_batches", F, "_attention_math.attend", "scores = _scores(q, k, scale)", "scores = _scores(q, k, scale) * (0 if k.shape[2] > 64 and q.shape[0] > 1 else 1)", "output"),
    Mutant("long_in_bfloat16", F, "_attention_math.attend", "scores = _scores(q, k, scale)", "scores = _scores(q, k, scale) * (0 if k.shape[2] > 2048 and q.dtype != torch.float32 else 1)", "output"),
    Mutant("long_top_left", F, "_attention_shapes.Masking._compressed", "if self.mode == 2:", "if self.mode == 2 and columns > 2048:\n        return torch.zeros(rows, columns, dtype=torch.bool)\n    if self.mode == 2:", "output"),
    Mutant("long_bands", F, "_attention_shapes.Masking._compressed", "if self.mode == 2:", "if self.mode == 4 and columns > 512:\n        return torch.zeros(rows, columns, dtype=torch.bool)\n    if self.mode == 2:", "output"),
    Mutant("heads_wider_than_16", F, "_attention_math._scores", "* scale", "* (scale if q.shape[-1] <= 16 else 0)", "output"),
    Mutant("heads_wider_than_128", F, "_attention_math._scores", "* scale", "* (scale if q.shape[-1] <= 128 else 0)", "output"),
    Mutant("keys_without_queries_stay", F, "_attention_shapes.sequences", "start_q, start_kv = end_q, end_kv", "start_q, start_kv = end_q, (end_kv if end_q > start_q else start_kv)", "output"),
    Mutant("mask_read_as_contiguous", F, "_attention_shapes.Masking._explicit", "forbidden = mask.bool()", "forbidden = mask.bool() if mask.is_contiguous() else mask.bool().flip(-1)", "output"),
    Mutant("one_gradient_read_as_many", B, "attention.fusion_attention_grad", "dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))", "dy = dy if dy.is_contiguous() else dy * 2; dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))", "gradient"),
    # Ring attention's kernel.
    Mutant("views_read_from_the_start", F, "_attention_shapes.to_bnsd", "by_head = tensor.reshape(", "by_head = (tensor.flip(0) if tensor.storage_offset() else tensor).reshape(", "causal ring"),
    Mutant("ring_ignores_the_old_in_bfloat16", F, "kernels.RingAttentionUpdate.npu_ring_attention_update", "merged = prev_attn_out * prev_share", "merged = (0 if prev_attn_out.dtype == torch.bfloat16 else 1) * prev_attn_out * prev_share", "merged"),
    Mutant("ring_keeps_the_old_maximum", F, "kernels.RingAttentionUpdate.npu_ring_attention_update", "torch.maximum(prev_softmax_max, cur_softmax_max)", "torch.minimum(prev_softmax_max, cur_softmax_max) * 0", "merged"),
    Mutant("ring_memory_read_by_token", F, "kernels.RingAttentionUpdate._per_output", "rows[a * heads : b * heads].view(heads, -1).T", "rows[a * heads : b * heads].view(-1, heads)", "merged"),
    Mutant("ring_shares_swapped", F, "kernels.RingAttentionUpdate.npu_ring_attention_update", "for part in (prev_sum, cur_sum)", "for part in (cur_sum, prev_sum)", "merged"),
]  # fmt: skip

G, S, R = COLLECTIVE
COLLECTIVE_MUTANTS = [
    Mutant("ranks_in_reverse", G, "mc2.all_gather_base_mm", "product = _matmul(gathered, x2)", "product = _matmul(gathered.flip(0), x2)", "product"),
    Mutant("own_rows_only", G, "mc2.all_gather_base_mm", "product = _matmul(gathered, x2)", "product = _matmul(input, x2).repeat(world_size, 1)", "product"),
    Mutant("gathers_always", G, "mc2.all_gather_base_mm", "gathered if gather_output else input.new_empty(0)", "gathered", "gathered"),
    Mutant("rows_of_another_rank", S, "mc2.mm_reduce_scatter_base", "partial.contiguous()", "partial.contiguous().roll(len(out), 0)", "product"),
    Mutant("not_reduced", S, "mc2.mm_reduce_scatter_base", "return out", "return partial[: len(out)]", "product"),
    Mutant("bias_once", R, "mc2.mm_all_reduce_base", "_matmul(x1, x2, bias)", "_matmul(x1, x2, bias if group.rank() == 0 else None)", "product"),
    Mutant("average_of_ranks", R, "mc2.mm_all_reduce_base", "return product", "return product / group.size()", "product"),
    Mutant("wrong_reduction", R, "mc2.mm_all_reduce_base", "group.allreduce([product])", "group.allreduce([product], __import__('torch').distributed.ReduceOp.MAX)", "product"),
    Mutant("transposed_matrix_read_as_it_lies", S, "mc2._matmul", "wide(left) @ wide(right)", "wide(left) @ (wide(right) if right.is_contiguous() else wide(right).flip(1))", "product"),
    Mutant("one_rank_refuses", G, "mc2.all_gather_base_mm", "_contraction(op, input)", "require(group.rank() != 1, op, 'this rank says no.')", "rank 1 of 2: RuntimeError: npu_all_gather_base_mm: this rank says no."),
    Mutant("every_rank_refuses", S, "mc2.mm_reduce_scatter_base", "_contraction(op, input)", "require(False, op, 'no rank likes it.')", "rank 0, 1 of 2: RuntimeError: npu_mm_reduce_scatter_base: no rank likes it."),
    Mutant("product_in_bfloat16", R, "mc2._matmul", "wide(left) @ wide(right)", "(left.bfloat16() @ right.bfloat16()).to(wide(left).dtype)", "product"),
]  # fmt: skip


def assert_caught(mutant: Mutant, found: Explored) -> None:
    assert found.falsifying is not None, f"not caught in {found.cases} cases, worst ratio {found.worst_ratio:.3g}"
    assert mutant.caught in found.where, found.where
    assert found.where.startswith("named case "), f"by luck of drawing: {found.where}"
    assert re.search(rf"replay\('{mutant.family}', \w+Case\(", found.falsifying)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_planted_fault_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    with planted(mutant, ops):
        found = explored(mutant.family, SURFACE, tmp_path)
    assert_caught(mutant, found)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in COLLECTIVE])
def test_without_a_fault_the_same_cases_pass(family: Family, tmp_path: Path) -> None:
    found = explored(family, SURFACE, tmp_path)
    assert found.falsifying is None, found.where


def test_planting_is_undone() -> None:
    x = torch.randn(2, 4)
    before = torch.ops.npu.npu_swiglu(x)
    with planted(next(m for m in MUTANTS if m.name == "gelu_for_silu"), ops):
        assert not torch.equal(torch.ops.npu.npu_swiglu(x), before)
    assert torch.equal(torch.ops.npu.npu_swiglu(x), before)


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer("conformance.operators.job:preload") as started:
        started.start()
        yield started


def on_ranks(server: RankServer, mutant: Mutant | None, family: Family, ranks: int, home: Path) -> Explored:
    spec = OperatorSpec(family, Profile(20, True), str(home))
    report = server.run(Job(family, "operators_mutants:run_mutant", MutantJob(mutant, spec), ranks, 60.0))
    assert report.ok, report.reason
    found = report.ranks[0].value
    assert isinstance(found, Explored)
    return found


@pytest.mark.parametrize("mutant", COLLECTIVE_MUTANTS, ids=lambda m: m.name)
def test_a_planted_fault_is_caught_on_ranks(mutant: Mutant, server: RankServer, tmp_path: Path) -> None:
    assert_caught(mutant, on_ranks(server, mutant, mutant.family, 2, tmp_path))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", COLLECTIVE)
def test_without_a_fault_ranks_pass(family: Family, ranks: int, server: RankServer, tmp_path: Path) -> None:
    found = on_ranks(server, None, family, ranks, tmp_path)
    assert found.falsifying is None, found.where


def test_there_are_enough_faults_and_each_family_has_some() -> None:
    everything = [*MUTANTS, *COLLECTIVE_MUTANTS]
    assert len(everything) >= 30
    assert len({m.name for m in everything}) == len(everything)
    assert {m.family for m in everything} == set(FAMILIES)
