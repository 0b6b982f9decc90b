"""How hypothesis draws cases. Each case is a frozen dataclass of numbers and words: it prints as the code that makes it."""

from __future__ import annotations

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

dtypes = st.sampled_from(DTYPES)
strides = st.sampled_from(STRIDES)
seeds = st.integers(0, 10_000)
sizes = st.sampled_from((1.0, 0.01, 4.0))


@st.composite
def attention(draw: st.DrawFn) -> AttentionCase:
    """Every layout; packed members from 0 to 40 queries, with as many keys, more, or fewer."""
    layout = draw(st.sampled_from(LAYOUTS))
    kv_heads = draw(st.integers(1, 3))
    width = draw(st.sampled_from((1, 2, 4, 8, 16)))
    # In layouts without a dimension of its own the value's width must follow from the heads.
    value_width = draw(st.integers(1, width))
    if layout == "TND":
        lengths = draw(st.lists(st.sampled_from((0, 1, 2, 5, 17, 40)), min_size=1, max_size=4))
        queries = tuple(lengths) if any(lengths) else (*lengths, 3)
        more = draw(st.lists(st.sampled_from((0, 0, 0, 1, 4, -1)), min_size=len(queries), max_size=len(queries)))
        keys = tuple(max(n + m, 1) if n else 0 for n, m in zip(queries, more, strict=True))
    else:
        batch, n_q, n_k = draw(st.integers(1, 3)), draw(st.integers(1, 12)), draw(st.integers(1, 12))
        queries, keys = (n_q,) * batch, (n_k,) * batch
    mode = draw(st.integers(0, 4))
    mask: Mask = draw(st.sampled_from(("none", "triangle") if mode >= 2 else ("none", *EXPLICIT)))
    band = mode in (0, 4) and mask in ("triangle", "random", "rows") and draw(st.booleans())
    forms = ("SS",) if layout == "TND" else ("SS", "11SS", "B1SS", "BNSS")
    return AttentionCase(
        layout,
        draw(dtypes),
        kv_heads * draw(st.integers(1, 4)),
        kv_heads,
        width,
        value_width,
        queries,
        keys,
        mode=mode,
        mask=mask,
        mask_form=draw(st.sampled_from(forms)),
        before=draw(st.integers(0, 6)) if band else 2147483647,
        after=draw(st.integers(0, 6)) if band else 2147483647,
        leading_zero=layout == "TND" and draw(st.booleans()),
        tail=draw(st.sampled_from((0, 0, 3))) if layout == "TND" else 0,
        scale=draw(st.sampled_from((0.5, 1.0, 0.125))),
        size=draw(st.sampled_from((1.0, 2.0))),
        strides=draw(strides),
        seed=draw(seeds),
    )


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
        zero_row=draw(st.booleans()),
        seed=draw(seeds),
    )


@st.composite
def swiglu(draw: st.DrawFn) -> SwigluCase:
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= 2
    return SwigluCase(tuple(shape), dim, draw(dtypes), draw(sizes), draw(strides), draw(seeds))


@st.composite
def rotary(draw: st.DrawFn) -> RotaryCase:
    a, b, c = (draw(st.integers(1, 5)) for _ in range(3))
    broadcast = draw(st.sampled_from(((), (0,), (1, 2), (0, 1), (0, 2), (0, 1, 2))))
    return RotaryCase(
        (a, b, c, 2 * draw(st.integers(1, 8))),
        broadcast,
        draw(st.sampled_from(("half", "interleave"))),
        draw(dtypes),
        draw(st.sampled_from(("operator", "kernel"))),
        draw(strides),
        draw(seeds),
    )


@st.composite
def fused_adamw(draw: st.DrawFn) -> AdamWCase:
    return AdamWCase(
        tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=2))),
        draw(st.sampled_from(("float32", "float32", "bfloat16"))),
        taken=draw(st.integers(1, 3)),
        before=draw(st.sampled_from((0, 1, 100))),
        lr=draw(st.sampled_from((0.01, 0.3))),
        betas=draw(st.sampled_from(((0.9, 0.95), (0.5, 0.999)))),
        weight_decay=draw(st.sampled_from((0.0, 0.1))),
        epsilon=draw(st.sampled_from((1e-3, 1e-6))),
        amsgrad=draw(st.booleans()),
        maximize=draw(st.booleans()),
        entry=draw(st.sampled_from(("operator", "kernel"))),
        size=draw(st.sampled_from((1.0, 0.01))),
        seed=draw(seeds),
    )


@st.composite
def moe(draw: st.DrawFn) -> MoeCase:
    entry: Entry = draw(st.sampled_from(ENTRIES))
    experts = draw(st.integers(1, 8))
    # With drop_and_pad an expert takes at most as many rows as there are tokens.
    tokens = draw(st.integers(1 if entry == "drop_and_pad" else 0, 12))
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
        dropped=draw(st.integers(0, rows // 2)) if entry == "indices" else 0,
        capacity=draw(st.integers(1, tokens)) if entry == "drop_and_pad" else 1,
        strides=draw(strides),
        seed=draw(seeds),
    )


@st.composite
def grouped_matmul(draw: st.DrawFn) -> GroupedCase:
    counts = draw(st.lists(st.sampled_from((0, 0, 1, 2, 5, 9)), min_size=1, max_size=6))
    return GroupedCase(
        tuple(counts) if any(counts) else (*counts, 2),
        draw(st.sampled_from((1, 3, 16, 100))),
        draw(st.integers(1, 9)),
        draw(dtypes),
        group_type=draw(st.sampled_from((0, 2))),
        totals=draw(st.booleans()),
        one_weight=draw(st.booleans()),
        split_item=draw(st.sampled_from((1, 2, 3))),
        with_bias=draw(st.booleans()),
        entry=draw(st.sampled_from(("operator", "list", "kernel"))),
        strides=draw(strides),
        seed=draw(seeds),
    )


@st.composite
def collective(draw: st.DrawFn) -> CollectiveCase:
    return CollectiveCase(
        draw(st.integers(1, 5)),
        draw(st.sampled_from((1, 8, 64))),
        draw(st.integers(1, 9)),
        draw(dtypes),
        with_bias=draw(st.booleans()),
        gather_output=draw(st.booleans()),
        strides=draw(strides),
        seed=draw(seeds),
    )
