"""npu_fusion_attention and npu_fusion_attention_grad.

Softmax statistics have a trailing dimension of 8 equal values. Layouts with a batch give (B, N, S, 8). TND gives a
tensor of shape (T, N, 8) which lies in memory sequence by sequence as (N, s, 8): only a reader who knows the lengths
can make sense of it, and MindSpeed's ring attention does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._attention_math import attend, attend_backward
from ._attention_shapes import Masking, Packed, check_inputs, from_bnsd, sequences, to_bnsd
from ._checks import only_defaults, refuse, require
from ._registry import Arguments, Derivative, differentiable, kernel

STATISTIC_WIDTH = 8
NOTHING_YET = 2147483647  # the vendor's default for pre_tockens and next_tockens: no limit


def _pack(statistic: Tensor, into: Tensor, part: Packed, heads: int) -> None:
    """Write (1, N, s, 1) of one packed sequence to its place in `into`, rows of 8 in memory order."""
    rows = statistic[0].reshape(-1, 1).expand(-1, STATISTIC_WIDTH)
    into[part.query.start * heads : part.query.stop * heads] = rows


def _unpack(statistic: Tensor, part: Packed, heads: int) -> Tensor:
    """The inverse of `_pack`: (T, N, 8) -> (1, N, s, 1)."""
    rows = statistic.reshape(-1, STATISTIC_WIDTH)[part.query.start * heads : part.query.stop * heads]
    return rows.view(1, heads, -1, STATISTIC_WIDTH)[..., :1]


def _bnsd(tensor: Tensor, part: slice) -> Tensor:
    """Tokens `part` of a packed (T, N, D) tensor as (1, N, s, D)."""
    return tensor[part].transpose(0, 1)[None]


def _refuse_unsupported(op: str, call: Arguments) -> None:
    only_defaults(op, **{k: call.get(k) for k in ("pse", "padding_mask", "prefix", "sink", "dropout_mask")})
    only_defaults(op, softmax_layout=call["softmax_layout"])
    require(0.0 < call["keep_prob"] <= 1.0, op, f"keep_prob must be above 0 and at most 1, got {call['keep_prob']}.")
    if call["keep_prob"] != 1.0:
        refuse(op, "keep_prob", call["keep_prob"])
    if call["inner_precise"] not in (0, 1, 2):
        refuse(op, "inner_precise", call["inner_precise"])


@kernel("npu_fusion_attention")
def fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NOTHING_YET,
    next_tockens: int = NOTHING_YET,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Softmax attention; key and value may have fewer heads than `head_num`, value's head may be narrower.

    Returns output (query's layout, value's head width), softmax maximum and sum (float32, see the module's
    docstring), an unused tensor, and three integers that describe dropout (0: there is none). Tokens after the last
    sequence of a TND input get zeros. A row in which every key is masked gives zeros, sum 0.
    Without `atten_mask` every key is seen, whatever `sparse_mode` says (so the vendor's documentation).
    """
    op = "npu_fusion_attention"
    _refuse_unsupported(op, locals())
    heads = check_inputs(op, query, key, value, head_num, input_layout)
    masking = Masking(op, atten_mask, sparse_mode, pre_tockens, next_tockens)
    wide_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if input_layout != "TND":
        q, k, v = (to_bnsd(t, input_layout, n) for t, n in zip((query, key, value), heads, strict=True))
        mask = masking.block(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        out, top, total = attend(q, k, v, mask, scale)
        spread = (*top.shape[:-1], STATISTIC_WIDTH)
        statistics = top.expand(spread).contiguous(), total.expand(spread).contiguous()
        return from_bnsd(out, input_layout), *statistics, query.new_empty(0), 0, 0, 0
    packed_out = query.new_zeros(*query.shape[:2], value.shape[-1])
    rows = torch.zeros(2, query.shape[0] * head_num, STATISTIC_WIDTH, dtype=wide_dtype)
    for part in sequences(op, actual_seq_qlen, actual_seq_kvlen, query.shape[0], key.shape[0]):
        q, k, v = _bnsd(query, part.query), _bnsd(key, part.key), _bnsd(value, part.key)
        out, top, total = attend(q, k, v, masking.packed(q.shape[2], k.shape[2]), scale)
        packed_out[part.query] = out[0].transpose(0, 1)
        _pack(top, rows[0], part, head_num)
        _pack(total, rows[1], part, head_num)
    top, total = (r.view(-1, head_num, STATISTIC_WIDTH).clone() for r in rows)
    return packed_out, top, total, query.new_empty(0), 0, 0, 0


@kernel("npu_fusion_attention_grad")
def fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = NOTHING_YET,
    next_tockens: int = NOTHING_YET,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key and value (and two empty tensors, for pse and sink).

    `softmax_max`, `softmax_sum` and `attention_in` may be those of a larger attention of which key and value are a
    part: the probabilities are rebuilt from them, not from this part alone. Ring attention relies on it.
    """
    op = "npu_fusion_attention_grad"
    _refuse_unsupported(op, locals())
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise RuntimeError(f"{op}: softmax_max, softmax_sum and attention_in are required.")
    heads = check_inputs(op, query, key, value, head_num, input_layout)
    require(dy.shape == attention_in.shape, op, f"dy {tuple(dy.shape)} and attention_in must have one shape.")
    rows = query.numel() // (query.shape[-1] // head_num if input_layout in ("SBH", "BSH") else query.shape[-1])
    require(
        softmax_max.numel() == softmax_sum.numel() == rows * STATISTIC_WIDTH,
        op,
        f"softmax_max and softmax_sum must have {STATISTIC_WIDTH} numbers for each of {rows} rows.",
    )
    masking = Masking(op, atten_mask, sparse_mode, pre_tockens, next_tockens)
    unused = query.new_empty(0), query.new_empty(0)
    if input_layout != "TND":
        q, k, v = (to_bnsd(t, input_layout, n) for t, n in zip((query, key, value), heads, strict=True))
        grad, out = (to_bnsd(t, input_layout, head_num) for t in (dy, attention_in))
        mask = masking.block(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        grads = attend_backward(q, k, v, grad, out, softmax_max[..., :1], softmax_sum[..., :1], mask, scale_value)
        dq, dk, dv = (from_bnsd(g, input_layout) for g in grads)
        return dq, dk, dv, *unused
    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (query, key, value))
    for part in sequences(op, actual_seq_qlen, actual_seq_kvlen, query.shape[0], key.shape[0]):
        q, k, v = _bnsd(query, part.query), _bnsd(key, part.key), _bnsd(value, part.key)
        grad, out = _bnsd(dy, part.query), _bnsd(attention_in, part.query)
        top, total = (_unpack(s, part, head_num) for s in (softmax_max, softmax_sum))
        mask = masking.packed(q.shape[2], k.shape[2])
        grads = attend_backward(q, k, v, grad, out, top, total, mask, scale_value)
        for into, where, g in zip((dq, dk, dv), (part.query, part.key, part.key), grads, strict=True):
            into[where] = g[0].transpose(0, 1)
    return dq, dk, dv, *unused


_SHARED = (
    *("pse", "padding_mask", "atten_mask", "keep_prob", "pre_tockens", "next_tockens", "inner_precise", "prefix"),
    *("actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync", "softmax_layout", "sink"),
)


def _backward(call: Arguments, outputs: Sequence[Any], grads: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    out, top, total, unused, seed, offset, numels = outputs
    dq, dk, dv, _, _ = torch.ops.npu.npu_fusion_attention_grad(
        *(call["query"], call["key"], call["value"], grads[0], call["head_num"], call["input_layout"]),
        softmax_max=top,
        softmax_sum=total,
        softmax_in=unused,
        attention_in=out,
        scale_value=call["scale"],
        seed=seed,
        offset=offset,
        numels=numels,
        **{name: call[name] for name in _SHARED},
    )
    return dq, dk, dv


differentiable(Derivative("npu_fusion_attention", ("query", "key", "value"), _backward))
