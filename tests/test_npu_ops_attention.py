"""npu_fusion_attention against scaled_dot_product_attention, whole and in two blocks as ring attention computes it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_npu_ops_support import TOLERANCE, Trace, agree, close, ops, randn, run
from torch import Tensor

pytestmark = pytest.mark.stack

SCALE = 0.37
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
npu = torch.ops.npu


def by_head(t: Tensor, heads: int) -> Tensor:
    return t.reshape(*t.shape[:2], heads, -1)


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "BNSD": (lambda t: t, lambda t, _: t),
    "BSND": (lambda t: t.transpose(1, 2), lambda t, _: t.transpose(1, 2)),
    "BSH": (lambda t: t.transpose(1, 2).flatten(-2), lambda t, n: by_head(t, n).transpose(1, 2)),
    "SBH": (lambda t: t.permute(2, 0, 1, 3).flatten(-2), lambda t, n: by_head(t, n).permute(1, 2, 0, 3)),
}


def reference(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None) -> Tensor:
    """PyTorch's own attention on (B, N, S, D); `allowed` True is visible."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=SCALE, enable_gqa=True)


def qkv(sq: int = 5, sk: int = 7, heads: int = 4, kv_heads: int = 2, dv: int = 6, **kw: Any) -> list[Tensor]:
    shapes = (2, heads, sq, 8), (2, kv_heads, sk, 8), (2, kv_heads, sk, dv)
    return [randn(*shape, seed=i, **kw) for i, shape in enumerate(shapes)]


def in_layout(layout: str, heads: int = 4, **options: Any) -> Callable[..., Tensor]:
    """The operator as a function on (B, N, S, D) tensors, called in `layout`."""
    into, back = LAYOUTS[layout]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = npu.npu_fusion_attention(into(q), into(k), into(v), heads, layout, scale=SCALE, **options)[0]
        return back(out, heads)

    return call


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_full_attention_in_every_layout(layout: str, dtype: torch.dtype) -> None:
    agree(in_layout(layout), reference, qkv(dtype=dtype))


def allowed(mode: int, sq: int, sk: int, before: int = 3, after: int = 1) -> Tensor:
    """What each sparse mode lets through, by the documentation's words, one entry at a time."""
    out = torch.zeros(sq, sk, dtype=torch.bool)
    for i in range(sq):
        for j in range(sk):
            from_right = j - (i + sk - sq)
            out[i, j] = {2: j <= i, 3: from_right <= 0, 4: -before <= from_right <= after}[mode]
    return out


@pytest.mark.parametrize("mode", [2, 3, 4])
@pytest.mark.parametrize(("sq", "sk"), [(5, 5), (4, 7)])
def test_compressed_masks(mode: int, sq: int, sk: int) -> None:
    options: dict[str, Any] = {"sparse_mode": mode, "atten_mask": TRIANGLE, "pre_tockens": 3, "next_tockens": 1}
    agree(in_layout("SBH", **options), lambda q, k, v: reference(q, k, v, allowed(mode, sq, sk)), qkv(sq, sk))


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 5, 7), (2, 4, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_explicit_masks_forbid_where_true(mode: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = randn(*shape, seed=9) > 0.6
    mask[..., 0] = False
    agree(in_layout("BNSD", sparse_mode=mode, atten_mask=mask.to(dtype)), lambda q, k, v: reference(q, k, v, ~mask), qkv())


def test_without_a_mask_the_sparse_mode_does_not_count() -> None:
    agree(in_layout("BNSD", sparse_mode=2), reference, qkv())


def test_fully_masked_rows_give_zero_and_no_gradient() -> None:
    inputs = qkv(6, 4)
    out, dq, *rest = run(in_layout("BNSD", sparse_mode=3, atten_mask=TRIANGLE), inputs)
    assert not out[:, :, :2].any()
    assert not dq[:, :, :2].any()
    assert all(torch.isfinite(g).all() for g in rest)
    inputs[0] = inputs[0][:, :, 2:]
    close(out[:, :, 2:], run(lambda q, k, v: reference(q, k, v, allowed(3, 4, 4)), inputs)[0], 1e-11)


def test_statistics_of_a_padded_batch() -> None:
    q, k, v = qkv()
    _, top, total, *rest = npu.npu_fusion_attention(q, k, v, 4, "BNSD", scale=SCALE)
    scores = SCALE * q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    assert top.shape == total.shape == (2, 4, 5, 8)
    close((top + total.log()), torch.logsumexp(scores, -1, keepdim=True).expand(2, 4, 5, 8), 1e-12)
    close(top[..., 0], scores.amax(-1), 1e-12)
    assert rest[1:] == [0, 0, 0]


# Packed sequences. Lengths differ between query and key.
ENDS_Q, ENDS_K = [0, 3, 3, 8], [0, 4, 4, 9]
TOKENS_Q, TOKENS_K = 10, 9  # two query tokens belong to no sequence


def tnd_inputs() -> list[Tensor]:
    return [randn(TOKENS_Q, 4, 8, seed=1), randn(TOKENS_K, 2, 8, seed=2), randn(TOKENS_K, 2, 6, seed=3)]


def tnd(q: Tensor, k: Tensor, v: Tensor, *, ends: tuple[list[int], list[int]] = (ENDS_Q, ENDS_K)) -> Any:
    lengths = {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
    return npu.npu_fusion_attention(q, k, v, 4, "TND", scale=SCALE, sparse_mode=3, atten_mask=TRIANGLE, **lengths)


def tnd_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def part(t: Tensor, a: int, b: int) -> Tensor:
        return t[a:b].transpose(0, 1)[None]

    outs = [
        reference(part(q, a, b), part(k, c, d), part(v, c, d), allowed(3, b - a, d - c))[0].transpose(0, 1)
        for a, b, c, d in ((0, 3, 0, 4), (3, 8, 4, 9))
    ]
    return torch.cat([*outs, q.new_zeros(TOKENS_Q - 8, 4, 6)])


def test_packed_sequences_with_empty_ones_and_a_tail() -> None:
    agree(tnd, tnd_reference, tnd_inputs())


def test_trailing_zeros_stand_for_absent_sequences() -> None:
    close(tnd(*tnd_inputs(), ends=([3, 8, 0, 0], [4, 9, 0, 0]))[0], tnd_reference(*tnd_inputs()), 1e-11)


def test_packed_members_with_queries_or_keys_alone() -> None:
    """Two queries without keys, three keys without queries, and one member with both: the first two have no part in it."""
    q, k, v = randn(5, 4, 8), randn(7, 2, 8, seed=2), randn(7, 2, 6, seed=3)
    ends = {"actual_seq_qlen": [2, 2, 5], "actual_seq_kvlen": [0, 3, 7]}

    def want(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = reference(*(t.transpose(0, 1)[None] for t in (q[2:], k[3:], v[3:])))[0].transpose(0, 1)
        return torch.cat((q.new_zeros(2, 4, 6), out))

    agree(lambda *t: npu.npu_fusion_attention(*t, 4, "TND", scale=SCALE, **ends), want, [q, k, v])


def check_packed_statistics() -> None:
    q, k, v = tnd_inputs()
    _, top, total, *_ = tnd(q, k, v)
    assert top.shape == (TOKENS_Q, 4, 8)
    row = 0
    for a, b, c, d in ((0, 3, 0, 4), (3, 8, 4, 9)):
        keys = k[c:d].repeat_interleave(2, 1)
        scores = SCALE * torch.einsum("qnd,knd->nqk", q[a:b], keys)
        scores = scores.masked_fill(~allowed(3, b - a, d - c), float("-inf"))
        want = torch.logsumexp(scores, -1).flatten()  # memory order: head by head within the sequence
        got = (top + total.log()).reshape(-1, 8)[row : row + len(want), 3]
        close(got, want, 1e-12)
        row += len(want)


def test_packed_statistics_lie_sequence_by_sequence() -> None:
    check_packed_statistics()


def halves_equal_the_whole() -> None:
    """Attention over two key blocks, merged by the statistics; gradients from the merged statistics, block by block."""
    q, k, v = qkv(6, 8)
    dy = randn(2, 4, 6, 6, seed=5)
    out, dq, dk, dv = run_with(reference, (q, k, v), dy)
    blocks = [(k[:, :, :3], v[:, :, :3]), (k[:, :, 3:], v[:, :, 3:])]
    parts = [npu.npu_fusion_attention(q, *block, 4, "BNSD", scale=SCALE)[:3] for block in blocks]
    top = torch.maximum(parts[0][1], parts[1][1])
    weights = [total * torch.exp(t - top) for _, t, total in parts]
    total = weights[0] + weights[1]
    merged = sum(o * (w / total)[..., :1] for (o, _, _), w in zip(parts, weights, strict=True))
    close(merged, out, 1e-11)
    statistics = {"softmax_max": top, "softmax_sum": total, "attention_in": merged, "scale_value": SCALE}
    grads = [npu.npu_fusion_attention_grad(q, *block, dy, 4, "BNSD", **statistics) for block in blocks]
    close(grads[0][0] + grads[1][0], dq, 1e-10)
    close(torch.cat([g[1] for g in grads], 2), dk, 1e-10)
    close(torch.cat([g[2] for g in grads], 2), dv, 1e-10)


def run_with(function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)]


def test_two_key_blocks_equal_the_whole() -> None:
    halves_equal_the_whole()


def test_trace_reads_as_on_hardware() -> None:
    with Trace() as trace:
        run(in_layout("SBH"), qkv())
    assert trace.names == ["npu_fusion_attention", "npu_fusion_attention_grad"]


# Planted faults: each must be caught by the comparisons above.


def test_off_by_one_in_the_causal_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ops._attention_shapes
    true = shapes.outside_band
    monkeypatch.setattr(shapes, "outside_band", lambda r, c, b, a, s: true(r, c, b, a + 1, s))
    with pytest.raises(AssertionError, match="off by"):
        test_compressed_masks(2, 5, 5)


def test_wrong_grouping_of_heads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops._attention_math, "expand_heads", lambda t, n: t.repeat(1, n // t.shape[1], 1, 1))
    with pytest.raises(AssertionError, match="off by"):
        test_full_attention_in_every_layout("SBH", torch.float64)


def test_token_major_statistics_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def token_major(statistic: Tensor, into: Tensor, part: Any, heads: int) -> None:
        rows = statistic[0].transpose(0, 1).reshape(-1, 1).expand(-1, 8)
        into[part.query.start * heads : part.query.stop * heads] = rows

    monkeypatch.setattr(ops.attention, "_pack", token_major)
    with pytest.raises(AssertionError, match="off by"):
        check_packed_statistics()


def test_a_gradient_from_the_block_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    true = ops.attention.attend_backward

    def own_statistics(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        dy, out, _, _, mask, scale = rest
        _, top, total = ops.attention.attend(q, k, v, mask, scale)
        return true(q, k, v, dy, out, top, total, mask, scale)

    monkeypatch.setattr(ops.attention, "attend_backward", own_statistics)
    with pytest.raises(AssertionError, match="off by"):
        halves_equal_the_whole()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input_layout": "BNDS"}, "input_layout must be one of"),
    ({"key": randn(2, 2, 7, 8, dtype=torch.float32)}, "one dtype"),
    ({"head_num": 3}, "head_num is 3"),
    ({"key": randn(2, 3, 7, 8), "value": randn(2, 3, 7, 6)}, "no multiple of 3 key heads"),
    ({"value": randn(2, 2, 7, 9)}, "Dq = Dk >= Dv"),
    ({"query": randn(3, 4, 5, 8)}, "one batch size"),
    ({"value": randn(2, 2, 6, 6)}, "size of their heads only"),
    ({"head_num": 0}, "must be positive"),
    ({"query": randn(4, 5, 8)}, "4-dimensional"),
    ({"atten_mask": torch.zeros(5, 6, dtype=torch.bool)}, "fits neither"),
    ({"atten_mask": torch.zeros(5, 7)}, "bool or uint8"),
    ({"atten_mask": torch.zeros(5, 7, dtype=torch.bool), "next_tockens": 0}, "beyond pre_tockens"),
    ({"atten_mask": torch.zeros(5, 7, dtype=torch.bool), "sparse_mode": 2}, "compressed"),
    ({"atten_mask": ~TRIANGLE, "sparse_mode": 3}, "above the diagonal"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD, ids=[s for _, s in BAD])
def test_forbidden_inputs(change: dict[str, Any], sentence: str) -> None:
    query, key, value = qkv()
    arguments = {"query": query, "key": key, "value": value, "head_num": 4, "input_layout": "BNSD"}
    npu.npu_fusion_attention(**arguments)
    with pytest.raises(RuntimeError, match=sentence):
        npu.npu_fusion_attention(**{**arguments, **change})


@pytest.mark.parametrize(
    ("ends", "sentence"),
    [
        ((None, None), "needs actual_seq_qlen"),
        (([3, 8], [9]), "one length"),
        (([8, 3], [4, 9]), "must not fall"),
        (([3, 11], [4, 9]), "but there are 10"),
    ],
)
def test_forbidden_sequences(ends: Any, sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        tnd(*tnd_inputs(), ends=ends)


@pytest.mark.parametrize(
    "change",
    [
        {"keep_prob": 0.9},
        {"sparse_mode": 5},
        {"softmax_layout": "TND"},
        {"inner_precise": 3},
        {"prefix": [1]},
        {"pse": randn(1)},
        {"padding_mask": randn(1)},
        {"sink": randn(1)},
        {"dropout_mask": randn(1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_unsupported_values_are_named(change: dict[str, Any]) -> None:
    name = next(iter(change))
    with pytest.raises(NotImplementedError, match=f"npu_fusion_attention does not support {name}="):
        npu.npu_fusion_attention(*qkv(), 4, "BNSD", **change)


def test_gradient_needs_the_statistics() -> None:
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="are required"):
        npu.npu_fusion_attention_grad(q, k, v, randn(2, 4, 5, 6), 4, "BNSD")
