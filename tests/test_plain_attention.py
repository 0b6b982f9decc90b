"""The plain backend's attention against torch's own, on one rank; each comparison must fail on a planted fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_oracle import assert_same, draw, plain_package, with_gradients
from torch import Tensor

pytestmark = pytest.mark.stack

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


@pytest.fixture(scope="module")
def te() -> Iterator[ModuleType]:
    with plain_package() as package:
        yield package


# --- attend


@dataclass(frozen=True)
class Case:
    """Sizes of (batch 2, heads, 7, d) queries and (2, groups, keys, d), (2, groups, keys, dv) keys and values; a mask's name."""

    heads: int = 4
    groups: int = 4
    keys: int = 7
    d: int = 8
    dv: int = 8
    mask: str = "none"

    def inputs(self) -> list[Tensor]:
        return [
            draw(2, self.heads, 7, self.d, seed=1),
            draw(2, self.groups, self.keys, self.d, seed=2),
            draw(2, self.groups, self.keys, self.dv, seed=3),
        ]

    def forbidden(self) -> Tensor | None:
        """True where attention is forbidden; `rows` forbids all of rows 2 and 5."""
        if self.mask == "none":
            return None
        if self.mask == "causal":
            return torch.ones(7, self.keys).triu(1).bool()
        mask = draw(2, 1, 7, self.keys, seed=4) > 0.4
        mask[..., 0] = False
        if self.mask == "rows":
            mask[:, :, [2, 5]] = True
        return mask


CASES = {
    "none": Case(),
    "causal": Case(mask="causal"),
    "arbitrary": Case(mask="arbitrary", keys=5),
    "gqa": Case(groups=2, mask="causal"),
    "mqa": Case(groups=1),
    "mla": Case(d=12, dv=6, mask="causal"),
    "empty_rows": Case(mask="rows"),
}


def check_attend(attend: Attend, case: Case) -> None:
    """attend() against scaled_dot_product_attention, gradients included."""
    forbidden = case.forbidden()
    allowed = None if forbidden is None else ~forbidden

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, forbidden, 0.3)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=0.3, enable_gqa=True)

    assert_same(ours, theirs, case.inputs())
    if case.mask == "rows":
        assert not ours(*case.inputs())[:, :, [2, 5]].any()


@pytest.mark.parametrize("name", CASES)
def test_attend(te: ModuleType, name: str) -> None:
    check_attend(te.attention.attend, CASES[name])


def _no_mask(attend: Attend) -> Attend:
    return lambda q, k, v, _forbidden, scale: attend(q, k, v, None, scale)


def _wrong_scale(attend: Attend) -> Attend:
    return lambda q, k, v, forbidden, scale: attend(q, k, v, forbidden, scale * (1 + 1e-6))


def _mask_off_by_one(attend: Attend) -> Attend:
    def faulty(q: Tensor, k: Tensor, v: Tensor, forbidden: Tensor | None, scale: float) -> Tensor:
        assert forbidden is not None
        return attend(q, k, v, forbidden.roll(1, -1), scale)

    return faulty


def _wrong_groups(attend: Attend) -> Attend:
    """Heads 0, 1, 2, 3 use groups 0, 1, 0, 1 where 0, 0, 1, 1 is right."""

    def faulty(q: Tensor, k: Tensor, v: Tensor, forbidden: Tensor | None, scale: float) -> Tensor:
        return attend(q[:, [0, 2, 1, 3]], k, v, forbidden, scale)[:, [0, 2, 1, 3]]

    return faulty


def _mean_of_empty(attend: Attend) -> Attend:
    """A row with everything forbidden sees everything."""

    def faulty(q: Tensor, k: Tensor, v: Tensor, forbidden: Tensor | None, scale: float) -> Tensor:
        assert forbidden is not None
        return attend(q, k, v, forbidden & ~forbidden.all(-1, keepdim=True), scale)

    return faulty


def _no_key_gradient(attend: Attend) -> Attend:
    return lambda q, k, v, forbidden, scale: attend(q, k.detach() + 0 * k, v, forbidden, scale)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (_no_mask, "causal"),
        (_no_mask, "arbitrary"),
        (_wrong_scale, "none"),
        (_mask_off_by_one, "causal"),
        (_wrong_groups, "gqa"),
        (_mean_of_empty, "empty_rows"),
        (_no_key_gradient, "mla"),
    ],
)
def test_attend_fault_is_caught(te: ModuleType, fault: Callable[[Attend], Attend], name: str) -> None:
    with pytest.raises(AssertionError):
        check_attend(fault(te.attention.attend), CASES[name])


def test_half_precision_is_computed_in_float32(te: ModuleType) -> None:
    q, k, v = (x.to(torch.bfloat16) for x in CASES["gqa"].inputs())
    truth = te.attention.attend(q.float(), k.float(), v.float(), None, 0.3)
    assert torch.equal(te.attention.attend(q, k, v, None, 0.3), truth.to(torch.bfloat16))
    in_half = (q @ k.repeat_interleave(2, 1).mT * 0.3).softmax(-1) @ v.repeat_interleave(2, 1)
    assert not torch.equal(in_half, truth.to(torch.bfloat16))  # the case tells the two apart


# --- packed sequences

#: Three sequences of 5, 1 and 4 tokens; with padding each takes 8, 2 and 6 rows.
LENGTHS, SPANS = (5, 1, 4), (8, 2, 6)


def offsets(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)


def module(te: ModuleType, **kwargs: Any) -> Any:
    return te.DotProductAttention(4, (8, 6), num_gqa_groups=2, softmax_scale=0.3, **kwargs)


def packed_inputs(rows: int) -> list[Tensor]:
    return [draw(rows, 4, 8, seed=5), draw(rows, 2, 8, seed=6), draw(rows, 2, 6, seed=7)]


def one_by_one(spans: tuple[int, ...], causal: bool) -> Callable[..., Tensor]:
    """The oracle: each sequence by itself through torch's attention, rows of padding zero."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = []
        for (start, end), length in zip(pairwise(offsets(spans).tolist()), LENGTHS, strict=True):
            part = [x[start : start + length].transpose(0, 1)[None] for x in (q, k, v)]
            result = F.scaled_dot_product_attention(*part, is_causal=causal, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
            out.append(F.pad(result.flatten(1), (0, 0, 0, end - start - length)))
        return torch.cat(out)

    return run


def packed(te: ModuleType, spans: tuple[int, ...], mask_type: str) -> Callable[..., Tensor]:
    cu, padded = offsets(LENGTHS), offsets(spans)
    kwargs: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "qkv_format": "thd", "attn_mask_type": mask_type}
    if spans != LENGTHS:
        kwargs |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    return lambda q, k, v: module(te)(q, k, v, **kwargs)


def check_packed(te: ModuleType, spans: tuple[int, ...], mask_type: str) -> None:
    oracle = one_by_one(spans, causal=mask_type == "padding_causal")
    assert_same(packed(te, spans, mask_type), oracle, packed_inputs(sum(spans)))


@pytest.mark.parametrize("mask_type", ["padding_causal", "padding"])
@pytest.mark.parametrize("spans", [LENGTHS, SPANS], ids=["dense", "padded"])
def test_packed_equals_each_sequence_alone(te: ModuleType, spans: tuple[int, ...], mask_type: str) -> None:
    check_packed(te, spans, mask_type)


@pytest.mark.parametrize("spans", [LENGTHS, SPANS], ids=["dense", "padded"])
def test_packed_without_mask_is_caught(te: ModuleType, spans: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te.attention, "attend", _no_mask(te.attention.attend))
    with pytest.raises(AssertionError):
        check_packed(te, spans, "padding_causal")


def check_padding_is_inert(te: ModuleType, mask_type: str) -> None:
    """Junk in rows of padding changes no bit of any value or gradient, and theirs are zero."""
    padding = torch.ones(sum(SPANS), dtype=torch.bool)
    for start, length in zip(offsets(SPANS).tolist()[:-1], LENGTHS, strict=True):
        padding[start : start + length] = False
    clean = packed_inputs(sum(SPANS))
    run = packed(te, SPANS, mask_type)
    expected = with_gradients(run, clean)
    for junk in (1e30, float("inf"), float("nan")):
        inputs = [x.index_fill(0, padding.nonzero().flatten(), junk) for x in clean]
        for left, right in zip(with_gradients(run, inputs), expected, strict=True):
            assert torch.equal(left, right)
            assert not left[padding].any()


@pytest.mark.parametrize("mask_type", ["padding_causal", "padding"])
def test_padding_is_inert(te: ModuleType, mask_type: str) -> None:
    check_padding_is_inert(te, mask_type)


def test_padding_that_is_seen_is_caught(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed attention that takes rows of padding for tokens."""
    original = te.DotProductAttention._packed
    seen = lambda self, q, k, v, _valid, padded, mask_type: original(self, q, k, v, padded, padded, mask_type)  # noqa: E731
    monkeypatch.setattr(te.DotProductAttention, "_packed", seen)
    with pytest.raises(AssertionError):
        check_padding_is_inert(te, "padding")
    with pytest.raises(AssertionError):
        check_packed(te, SPANS, "padding")


def test_empty_sequences_and_rows_past_the_last_one(te: ModuleType) -> None:
    cu = torch.tensor([0, 5, 5, 6, 10])
    q, k, v = packed_inputs(12)
    got = module(te)(q, k, v, qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, attn_mask_type="padding_causal")
    torch.testing.assert_close(got[:10], one_by_one(LENGTHS, causal=True)(q[:10], k[:10], v[:10]))
    assert not got[10:].any()


# --- padded batches


def check_batch(te: ModuleType, layout: str, mask_type: str, mask: Tensor | None) -> None:
    """sbhd or bshd with a mask type (and mask) against torch's attention."""
    inputs = [draw(7, 2, 4, 8, seed=5), draw(7, 2, 2, 8, seed=6), draw(7, 2, 2, 6, seed=7)]
    allowed = torch.ones(7, 7, dtype=torch.bool).tril() if "causal" in mask_type else torch.ones(7, 7, dtype=torch.bool)
    allowed = allowed if mask is None else allowed & ~mask

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layout == "sbhd":
            out: Tensor = module(te)(q, k, v, mask, attn_mask_type=mask_type)
            return out
        batch_first = (x.transpose(0, 1) for x in (q, k, v))
        result: Tensor = module(te)(*batch_first, mask, qkv_format="bshd", attn_mask_type=mask_type)
        return result.transpose(0, 1)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = F.scaled_dot_product_attention(*heads_first, attn_mask=allowed, scale=0.3, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)

    assert_same(ours, theirs, inputs)


def right_padding() -> Tensor:
    """(2, 1, 1, 7): the second sequence has five valid tokens."""
    return (torch.arange(7) >= torch.tensor([[7], [5]]))[:, None, None]


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask_type", ["causal", "no_mask", "padding", "padding_causal", "arbitrary"])
def test_batch(te: ModuleType, layout: str, mask_type: str) -> None:
    mask = {"arbitrary": Case(mask="rows").forbidden()}.get(mask_type, right_padding() if "padding" in mask_type else None)
    check_batch(te, layout, mask_type, mask)


@pytest.mark.parametrize("mask_type", ["causal", "padding", "arbitrary"])
def test_batch_without_mask_is_caught(te: ModuleType, mask_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te.attention, "attend", _no_mask(te.attention.attend))
    with pytest.raises(AssertionError):
        check_batch(te, "sbhd", mask_type, None if mask_type == "causal" else right_padding())


def test_default_scale_is_that_of_the_query_channels(te: ModuleType) -> None:
    assert te.DotProductAttention(4, 16).softmax_scale == 0.25
    assert te.DotProductAttention(4, (64, 16)).softmax_scale == 0.125
