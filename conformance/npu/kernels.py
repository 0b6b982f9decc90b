"""MindSpeed's compiled kernels, in PyTorch.

MindSpeed compiles C++ extensions against CANN at first use and keeps them in `MindSpeedOpBuilder._loaded_ops`, by
name. Filling that table first is all it takes. Each class below stands for one extension module and has its functions,
with the C++ signature in order.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

GroupList = Sequence[int] | Tensor | None


def _entries(group_list: GroupList) -> list[int]:
    if group_list is None:
        raise RuntimeError("npu_gmm: group_list is required.")
    return [int(n) for n in (group_list.tolist() if isinstance(group_list, Tensor) else group_list)]


class FusedAdamWV2:
    """Extension npu_apply_fused_adamw_v2, over aclnnApplyAdamWV2."""

    def __init__(self, ops: ModuleType) -> None:
        self._ops = ops

    def npu_apply_fused_adamw_v2(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        max_exp_avg_sq: Tensor,  # noqa: ARG002 - read with amsgrad only
        state_step: Tensor,
        lr: float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
    ) -> None:
        """One AdamW step in place; `state_step` counts from 1 and includes this step."""
        if amsgrad:
            raise NotImplementedError("emulated npu_apply_fused_adamw_v2 does not support amsgrad=True")
        step = float(state_step)
        self._ops.optimizer.adamw_step(
            *(param, grad, exp_avg, exp_avg_sq, None),
            lr=lr,
            betas=(beta1, beta2),
            powers=(beta1**step, beta2**step),
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
        )


class MatmulAdd:
    """Extension npu_matmul_add_fp32, over ATB's LinearOperation with accumulation."""

    def npu_matmul_add_fp32(self, x: Tensor, weight: Tensor, C: Tensor) -> None:
        """C += x.T @ weight, C float32: weight gradient from output gradient `x` (T, N) and input `weight` (T, K)."""
        if C.dtype != torch.float32:
            raise RuntimeError(f"npu_matmul_add_fp32: the accumulator must be float32, got {C.dtype}.")
        C.add_(x.float().T @ weight.float())


class GroupMatmulAdd:
    """Extension npu_groupmatmul_add_fp32, over ATB's GroupedMatmulInplaceAddOperation."""

    def npu_groupmatmul_add_fp32(self, x: Tensor, weight: Tensor, group_list: Tensor, grad: Tensor) -> None:
        """grad[e] += x[rows of e].T @ weight[rows of e]; `group_list` holds running totals, grad float32 is (E, K, N)
        in memory whatever its shape."""
        if grad.dtype != torch.float32:
            raise RuntimeError(f"npu_groupmatmul_add_fp32: the accumulator must be float32, got {grad.dtype}.")
        bounds = [0, *_entries(group_list)]
        if bounds[-1] != len(x):
            raise RuntimeError(f"npu_groupmatmul_add_fp32: group_list covers {bounds[-1]} of {len(x)} rows.")
        by_group = grad.view(len(bounds) - 1, x.shape[1], weight.shape[1])
        for group, (a, b) in enumerate(pairwise(bounds)):
            by_group[group] += x[a:b].float().T @ weight[a:b].float()


class GroupedMatmul:
    """Extensions grouped_matmul (aclnnGroupedMatmulV2, lists of running totals) and grouped_matmul_v2
    (aclnnGroupedMatmulV4, tensors of totals or, with group_list_type 1, counts)."""

    def __init__(self, ops: ModuleType) -> None:
        self._ops = ops

    def npu_gmm(
        self,
        x: list[Tensor],
        weight: list[Tensor],
        bias: list[Tensor],
        group_list: GroupList,
        group_type: int | None,
        group_list_type: int | None,
    ) -> list[Tensor]:
        """Grouped product as one tensor in a list: (T, N), or (E, K, N) for group_type 2."""
        result: list[Tensor] = self._ops.grouped_matmul.grouped_matmul(
            x,
            weight,
            bias=bias or None,
            group_list=_entries(group_list),
            split_item=3,
            group_type=-1 if group_type is None else group_type,
            group_list_type=group_list_type,
        )
        return result

    def npu_gmm_backward(
        self,
        grad: list[Tensor],
        x: list[Tensor],
        weight: list[Tensor],
        group_list: GroupList,
        group_list_type: int | None,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Gradients of x and weight; none of a bias."""
        dx, _, dbias = self.npu_gmm_backward_fusion(grad, weight, group_list, group_list_type)
        dw = self.npu_gmm([t.transpose(-1, -2) for t in x], grad, [], group_list, 2, group_list_type)
        return dx, [d.reshape(w.shape) for d, w in zip(dw, weight, strict=True)], dbias

    def npu_gmm_backward_fusion(
        self, grad: list[Tensor], weight: list[Tensor], group_list: GroupList, group_list_type: int | None
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Gradient of x only: the caller accumulates that of weight with npu_groupmatmul_add_fp32."""
        transposed = [w.transpose(-1, -2) for w in weight]
        return self.npu_gmm(grad, transposed, [], group_list, 0, group_list_type), [], []


class RotaryPositionEmbedding:
    """Extension npu_rotary_position_embedding, over aclnnRotaryPositionEmbedding and its Grad (here autograd's)."""

    def __init__(self, ops: ModuleType) -> None:
        self._ops = ops

    def npu_rotary_position_embedding(self, x: Tensor, cos: Tensor, sin: Tensor, mode: int = 0) -> Tensor:
        """x * cos + rotated(x) * sin on 4-D tensors; mode 0 rotates halves, 1 neighbours."""
        modes = {0: "half", 1: "interleave"}
        if mode not in modes:
            raise RuntimeError(f"npu_rotary_position_embedding: mode must be 0 or 1, got {mode}.")
        result: Tensor = self._ops.rotary.rotary_mul(x, cos, sin, modes[mode])
        return result


class RingAttentionUpdate:
    """Extension npu_ring_attention_update, over aclnnRingAttentionUpdate."""

    def npu_ring_attention_update(
        self,
        prev_attn_out: Tensor,
        prev_softmax_max: Tensor,
        prev_softmax_sum: Tensor,
        cur_attn_out: Tensor,
        cur_softmax_max: Tensor,
        cur_softmax_sum: Tensor,
        actual_seq_qlen: Tensor | None = None,
        layout: str = "SBH",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Merge two partial attentions: output, softmax maximum and sum.

        SBH: outputs (S, B, H), statistics (B, N, S, 8). TND: outputs (T, N, D), statistics (T, N, 8) that lie in
        memory per sequence as (N, s, 8), `actual_seq_qlen` running totals with a leading 0.
        """
        top = torch.maximum(prev_softmax_max, cur_softmax_max)
        prev_sum = prev_softmax_sum * torch.exp(prev_softmax_max - top)
        cur_sum = cur_softmax_sum * torch.exp(cur_softmax_max - top)
        total = prev_sum + cur_sum
        prev_share, cur_share = (
            self._per_output((part / total)[..., 0], prev_attn_out, actual_seq_qlen, layout) for part in (prev_sum, cur_sum)
        )
        merged = prev_attn_out * prev_share + cur_attn_out * cur_share
        return merged.to(prev_attn_out.dtype), top, total

    @staticmethod
    def _per_output(share: Tensor, out: Tensor, ends: Tensor | None, layout: str) -> Tensor:
        """Spread one number per head and token over the output's layout."""
        if layout == "SBH":
            heads = share.shape[1]
            return share.permute(2, 0, 1).repeat_interleave(out.shape[-1] // heads, -1)
        if layout != "TND":
            raise NotImplementedError(f"emulated npu_ring_attention_update does not support layout={layout!r}")
        if ends is None:
            raise RuntimeError("npu_ring_attention_update: layout TND needs actual_seq_qlen.")
        heads, rows = out.shape[1], share.reshape(-1)
        parts = [rows[a * heads : b * heads].view(heads, -1).T for a, b in pairwise(ends.tolist())]
        return torch.cat(parts)[..., None]


def kernels(ops: ModuleType) -> dict[str, object]:
    """One object per compiled extension, by MindSpeed's name for it. `ops` is the package of emulated operators."""
    grouped = GroupedMatmul(ops)
    return {
        "npu_apply_fused_adamw_v2": FusedAdamWV2(ops),
        "npu_matmul_add_fp32": MatmulAdd(),
        "npu_groupmatmul_add_fp32": GroupMatmulAdd(),
        "grouped_matmul": grouped,
        "grouped_matmul_v2": grouped,
        "npu_rotary_position_embedding": RotaryPositionEmbedding(ops),
        "npu_ring_attention_update": RingAttentionUpdate(),
    }


def install_kernels() -> None:
    """Fill MindSpeed's table of loaded extensions. Needs the emulated torch_npu, and MindSpeed, importable."""
    import torch_npu.ops
    from mindspeed.op_builder.builder import MindSpeedOpBuilder

    MindSpeedOpBuilder._loaded_ops.update(kernels(torch_npu.ops))
    _offer_on_cpu()


@cache
def _offer_on_cpu() -> Any:
    """Register MindSpeed's grouped product where emulated tensors are looked up; once per process.

    MindSpeed registers it for PrivateUse1, hardware's dispatch key, only. CompositeImplicitAutograd, because the
    function brings its own autograd. Returned, and so kept by the cache: the registration lives as long as the library.
    """
    from mindspeed.ops import gmm

    library: Any = torch.library.Library("mindspeed", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in (
        ("npu_gmm.List", gmm._npu_gmm),
        ("npu_gmm.Tensor", gmm._npu_gmm),
        ("npu_gmm_v2.Tensor", gmm._npu_gmm_v2),
    ):
        library.impl(name, function, "CompositeImplicitAutograd")
    return library
