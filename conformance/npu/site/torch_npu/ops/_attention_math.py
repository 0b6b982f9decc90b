"""Attention on (B, N, S, D) tensors, forward with its softmax statistics, and backward from them."""

import torch
from torch import Tensor

from ._checks import wide


def expand_heads(tensor: Tensor, heads: int) -> Tensor:
    """(B, N_kv, S, D) -> (B, heads, S, D): query head h reads key head h // (heads / N_kv)."""
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (wide(q) @ wide(expand_heads(k, q.shape[1])).transpose(-1, -2)) * scale


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Output (q's dtype), row maximum and row sum of exponentials, both (B, N, S, 1).

    A row without a visible key: output 0, sum 0, maximum the lowest finite number, so that it has no weight when
    rings are merged.
    """
    scores = _scores(q, k, scale)
    lowest = torch.finfo(scores.dtype).min
    if mask is not None:
        scores = scores.masked_fill(mask, float("-inf"))
    top = scores.amax(-1, keepdim=True) if k.shape[2] else scores.new_full((*q.shape[:3], 1), lowest)
    top = top.clamp_min(lowest)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    probabilities = weights / torch.where(total == 0, 1.0, total)
    return (probabilities @ wide(expand_heads(v, q.shape[1]))).to(q.dtype), top, total


def _sum_heads(grad: Tensor, kv_heads: int) -> Tensor:
    batch, heads, *rest = grad.shape
    return grad.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(2)


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dy: Tensor,
    out: Tensor,
    top: Tensor,
    total: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. `top`, `total` and `out` may belong to a larger set of keys than `k`."""
    heads, kv_heads = q.shape[1], k.shape[1]
    probabilities = torch.exp(_scores(q, k, scale) - top) / total
    hidden = total == 0 if mask is None else mask | (total == 0)
    probabilities = probabilities.masked_fill(hidden, 0.0)
    grad, values = wide(dy), wide(expand_heads(v, heads))
    dv = probabilities.transpose(-1, -2) @ grad
    correction = (grad * wide(out)).sum(-1, keepdim=True)
    dscores = probabilities * (grad @ values.transpose(-1, -2) - correction) * scale
    dq = dscores @ wide(expand_heads(k, heads))
    dk = dscores.transpose(-1, -2) @ wide(q)
    return dq.to(q.dtype), _sum_heads(dk, kv_heads).to(k.dtype), _sum_heads(dv, kv_heads).to(v.dtype)
