"""How hypothesis draws cases. Each case is a frozen dataclass of numbers and words: it prints as the code that makes it."""

from __future__ import annotations

from typing import Literal

from hypothesis import strategies as st

from conformance.operators.attention import AttentionCase, Layout, Mask
from conformance.operators.elementwise import AdamWCase, RmsNormCase, RotaryCase, SwigluCase
from conformance.operators.matmul import CollectiveCase, GroupedCase
from conformance.operators.moe import Entry, MoeCase, Routing
from conformance.operators.surface import Dtype, Strides

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
STRIDES: tuple[Strides, ...] = ("contiguous", "sliced", "transposed", "expanded")
LAYOUTS: tuple[Layout, ...] = ("BNSD", "BSND", "BSH", "SBH", "TND")
EXPLICIT: tuple[Mask, ...] = ("random", "rows", "padding")
ENTRIES: tuple[Entry, ...] = ("indices", "routing_map", "drop_and_pad")
ROUTINGS: tuple[Routing, ...] = ("random", "few", "one", "tied", "twice")

Written = Literal["contiguous", "sliced", "transposed"]
WRITTEN: tuple[Written, ...] = ("contiguous", "sliced", "transposed")

dtypes = st.sampled_from(DTYPES)
strides = st.sampled_from(STRIDES)
#: For what is written, and for what must not repeat: no entry lies twice in memory.
written = st.sampled_from(WRITTEN)
seeds = st.integers(0, 10_000)
sizes = st.sampled_from((1.0, 0.01, 4.0))


@st.composite
def attention(draw: st.DrawFn) -> AttentionCase:
    """Every layout; packed members from 0 to 40 queries, with as many keys, more, or fewer; now and then a long case."""
    layout = draw(st.sampled_from(LAYOUTS))
    long = draw(_rarely())
    kv_heads = draw(st.integers(1, 3 if not long else 2))
    width, value_width = draw(_widths())
    mode = draw(st.integers(0, 4))
    if layout == "TND":
        queries, keys = draw(_packed(long=long, never_fewer=mode >= 3))
    else:
        n_q, n_k = (draw(st.integers(1, 12)) for _ in range(2))
        batch = draw(st.integers(1, 3))
        if long:
            batch, n_q, n_k = draw(st.sampled_from(((2, 520, 520), (2, 600, 530), (1, 2060, 2060), (2, 3, 2060))))
        queries, keys = (n_q,) * batch, (n_k,) * batch
    mask: Mask = draw(st.sampled_from(_masks(layout, mode, long=long)))
    banded = mask == "triangle" if layout == "TND" else mask in ("triangle", "random", "rows")
    band = mode in (0, 4) and banded and draw(st.booleans())
    reach = st.integers(0, 6) if not long else st.sampled_from((0, 3, 300))
    forms = ("SS",) if layout == "TND" or long else ("SS", "11SS", "B1SS", "BNSS")
    return AttentionCase(
        layout,
        draw(dtypes),
        kv_heads * draw(st.integers(1, 4 if not long else 2)),
        kv_heads,
        width,
        value_width,
        queries,
        keys,
        mode=mode,
        mask=mask,
        mask_form=draw(st.sampled_from(forms)),
        before=draw(reach) if band else 2147483647,
        after=draw(reach) if band else 2147483647,
        leading_zero=layout == "TND" and draw(st.booleans()),
        tail=draw(st.sampled_from((0, 0, 3))) if layout == "TND" else 0,
        scale=draw(st.sampled_from((0.5, 1.0, 0.125))),
        size=draw(st.sampled_from((1.0, 2.0))) if width <= 16 else 0.5,
        strides=draw(strides),
        others=draw(written),
        incoming=draw(strides),
        seed=draw(seeds),
    )


@st.composite
def _rarely(draw: st.DrawFn) -> bool:
    """True about once in thirty times, and not what hypothesis shrinks to."""
    return draw(st.integers(0, 29)) == 29


@st.composite
def _widths(draw: st.DrawFn) -> tuple[int, int]:
    """Of a head: queries and keys, and values, which may be narrower. The wide ones are those of models."""
    if draw(st.integers(0, 9)) == 9:
        return draw(st.sampled_from(((64, 64), (128, 128), (192, 128))))
    width = draw(st.sampled_from((1, 2, 4, 8, 16)))
    return width, draw(st.integers(1, width))


@st.composite
def _packed(draw: st.DrawFn, *, long: bool, never_fewer: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Queries and keys of each member. Only a member without queries is without keys, and it may have some."""
    lengths = (0, 1, 2, 5, 17, 40)
    drawn = draw(st.lists(st.sampled_from(lengths), min_size=1, max_size=4))
    if long:
        drawn[-1] = draw(st.sampled_from((520, 600, 600, 2060)))
    queries = tuple(drawn) if any(drawn) else (*drawn, 3)
    steps = (0, 0, 0, 1, 4) if never_fewer else (0, 0, 0, 1, 4, -1)
    more = draw(st.lists(st.sampled_from(steps), min_size=len(queries), max_size=len(queries)))
    return queries, tuple(max(n + m, 1 if n else 0) for n, m in zip(queries, more, strict=True))


def _masks(layout: Layout, mode: int, *, long: bool) -> tuple[Mask, ...]:
    if mode >= 2:
        return ("none", "triangle", "triangle") if long else ("none", "triangle")
    return ("none", "random", "padding") if layout == "TND" else ("none", *EXPLICIT)


@st.composite
def rms_norm(draw: st.DrawFn) -> RmsNormCase:
    lead = draw(st.lists(st.integers(0, 5), min_size=0, max_size=2))
    gamma_dims = draw(st.integers(1, 2))
    normed = [draw(st.sampled_from((1, 2, 7, 64, 300))), draw(st.integers(1, 3))][:gamma_dims][::-1]
    return RmsNormCase(
        (*lead, *normed),
        gamma_dims,
        draw(dtypes),
        epsilon=draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
        size=draw(sizes),
        strides=draw(strides),
        others=draw(strides),
        incoming=draw(strides),
        zero_row=draw(st.booleans()),
        seed=draw(seeds),
    )


@st.composite
def swiglu(draw: st.DrawFn) -> SwigluCase:
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= 2
    return SwigluCase(tuple(shape), dim, draw(dtypes), draw(sizes), draw(strides), draw(strides), draw(seeds))


@st.composite
def rotary(draw: st.DrawFn) -> RotaryCase:
    """Tables that the vendor takes: one for all heads, and with `half` one for each batch member, or for everything.

    Heads before the sequence (BNSD) want heads of whole 32-byte blocks, and no more of them than eight times the sequence.
    """
    mode: Literal["half", "interleave"] = draw(st.sampled_from(("half", "interleave")))
    a, b, c = (draw(st.integers(1, 5)) for _ in range(3))
    width = 2 * draw(st.integers(1, 8))
    shared = ((0, 1), (0, 2), (1, 2))
    broadcast = draw(st.sampled_from(shared if mode == "interleave" else ((), (1,), (2,), *shared)))
    if broadcast in ((0, 1), (1,)):
        width = draw(st.sampled_from((32, 64)))
        c = -(-a * b // 8)
    if broadcast == ():
        width, c = 32, 5
    return RotaryCase(
        (a, b, c, width),
        broadcast,
        mode,
        draw(dtypes),
        draw(st.sampled_from(("operator", "kernel"))),
        draw(strides),
        draw(strides),
        draw(strides),
        draw(seeds),
    )


@st.composite
def fused_adamw(draw: st.DrawFn) -> AdamWCase:
    entry: Literal["operator", "kernel"] = draw(st.sampled_from(("operator", "kernel")))
    return AdamWCase(
        tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=2))),
        draw(st.sampled_from(("float32", "float32", "bfloat16"))),
        taken=draw(st.integers(1, 3)),
        before=draw(st.sampled_from((0, 1, 100))),
        lr=draw(st.sampled_from((0.01, 0.3))),
        betas=draw(st.sampled_from(((0.9, 0.95), (0.5, 0.999)))),
        weight_decay=draw(st.sampled_from((0.0, 0.1))),
        epsilon=draw(st.sampled_from((1e-3, 1e-6))),
        amsgrad=entry == "operator" and draw(st.booleans()),
        maximize=draw(st.booleans()),
        entry=entry,
        size=draw(st.sampled_from((1.0, 0.01))),
        strides=draw(written),
        seed=draw(seeds),
    )


@st.composite
def moe(draw: st.DrawFn, *, undone: bool = False) -> MoeCase:
    """`undone`: for unpermutation, which takes neither no tokens nor fewer rows than tokens times choices."""
    entry: Entry = draw(st.sampled_from(ENTRIES))
    experts = draw(st.integers(1, 8))
    # With drop_and_pad an expert takes at most as many rows as there are tokens.
    tokens = draw(st.integers(1 if entry == "drop_and_pad" or undone else 0, 12))
    if draw(_rarely()):
        tokens, experts = draw(st.sampled_from((50, 300))), 16
    chosen = draw(st.integers(1, min(4, experts)))
    rows = tokens * chosen
    return MoeCase(
        entry,
        tokens,
        draw(st.sampled_from((1, 3, 8))),
        experts,
        chosen,
        draw(dtypes),
        routing=draw(st.sampled_from(ROUTINGS)),
        with_probs=draw(st.booleans()),
        flat=draw(st.booleans()),
        dropped=draw(st.integers(0, rows // 2)) if entry == "indices" and not undone else 0,
        from_the_end=draw(st.booleans()),
        capacity=draw(st.integers(1, tokens)) if entry == "drop_and_pad" else 1,
        narrow=draw(st.booleans()),
        strides=draw(strides),
        others=draw(written),
        incoming=draw(strides),
        seed=draw(seeds),
    )


@st.composite
def grouped_matmul(draw: st.DrawFn) -> GroupedCase:
    """What the vendor takes; see GroupedCase."""
    entry: Literal["operator", "list", "kernel"] = draw(st.sampled_from(("operator", "list", "kernel")))
    dtype = draw(dtypes)
    listed = entry == "list"
    group_type: Literal[0, 2] = 0 if listed else draw(st.sampled_from((0, 2)))
    rows = (1, 2, 5, 9) if listed else (0, 0, 1, 2, 5, 9)
    counts = draw(st.lists(st.sampled_from(rows), min_size=2 if listed else 1, max_size=6))
    return GroupedCase(
        tuple(counts) if any(counts) else (*counts, 2),
        draw(st.sampled_from((1, 3, 16, 100))),
        draw(st.integers(1, 9)),
        dtype,
        group_type=group_type,
        totals=listed or len(counts) == 1 or draw(st.booleans()),
        one_weight=not listed and (entry == "kernel" or dtype == "float32" or draw(st.booleans())),
        split_item=draw(st.sampled_from((1, 2, 3) if listed else (2, 3))),
        with_bias=entry != "kernel" and draw(st.booleans()),
        entry=entry,
        strides=draw(st.sampled_from(("contiguous", "transposed"))),
        seed=draw(seeds),
    )


@st.composite
def collective(draw: st.DrawFn, *, batched: bool = False) -> CollectiveCase:
    """What the vendor takes; see CollectiveCase. `batched`: the left operand may have three dimensions."""
    return CollectiveCase(
        draw(st.integers(1, 5)),
        draw(st.sampled_from((256, 257, 384))),
        draw(st.integers(1, 9)),
        draw(st.sampled_from(("bfloat16", "float16"))),
        with_bias=draw(st.booleans()),
        gather_output=draw(st.booleans()),
        strides=draw(st.sampled_from(("contiguous", "transposed"))),
        batch=draw(st.sampled_from((None, 1, 3))) if batched else None,
        seed=draw(seeds),
    )
