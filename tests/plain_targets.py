"""What the tests of the plain backend run in ranks: it goes onto the import path there, never in the process of pytest.

Each target compares one thing with an oracle that is not ours (torch.nn.functional, or the whole on one rank) and returns
the gap: the largest difference in the output and in all gradients, relative to the largest entry of the oracle's. `fault`
names what is planted first; the same comparison must then find it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from conformance import plain
from conformance.ranks import RankContext

#: Relative. What float64 rounding leaves; every planted fault is at least a thousand times larger.
BOUND = 1e-12


def preload(_: object) -> None:
    """Import megatron-core over the plain backend. Its collectives allocate on the current CUDA device: make that the CPU."""
    plain.activate()
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401


def facts(_: object, _context: RankContext) -> dict[str, object]:
    """What megatron-core makes of it."""
    import transformer_engine
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.utils import get_te_version

    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(num_experts=4, moe_grouped_gemm=True)
    return {
        "file": transformer_engine.__file__,
        "version": str(get_te_version()),
        "have_te": (extension.HAVE_TE, gpt_layer_specs.HAVE_TE),
        "attention": spec.submodules.self_attention.submodules.core_attention.__name__,
        "bases": [c.__module__ for c in extension.TEDotProductAttention.__mro__],
        "experts": spec.submodules.mlp.submodules.experts.module.__name__,
    }


def gap(ours: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest difference over all pairs, each relative to the largest entry of the truth; inf for nan."""
    assert [x.shape for x in ours] == [x.shape for x in truth]
    worst = 0.0
    for a, b in zip(ours, truth, strict=True):
        difference = float((a - b).abs().max() / (b.abs().max() or 1.0))
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal, float64, the same in every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def outcome(f: Callable[..., Tensor], leaves: Sequence[Tensor], cotangent: Tensor | None = None) -> list[Tensor]:
    """The output of `f` on `leaves` and the gradients of <output, cotangent> by them."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    output = f(*leaves)
    seen = draw(*output.shape, seed=9) if cotangent is None else cotangent
    return [output.detach(), *torch.autograd.grad(output, leaves, seen)]


def module_gap(module: nn.Module, oracle: Callable[..., Tensor], x: Tensor, *arguments: object) -> float:
    """`module(x, *arguments)` against `oracle(x, *parameters)`, with gradients by input and parameters."""
    names = [name for name, _ in module.named_parameters()]

    def ours(inp: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(module, given, (inp, *arguments))  # type: ignore[no-any-return]

    leaves = [x, *(draw(*p.shape, seed=i) for i, p in enumerate(module.parameters()))]
    return gap(outcome(ours, leaves), outcome(oracle, leaves))


# --- layers


def norm(payload: tuple[str, bool, str | None], _context: RankContext) -> float:
    """(class, zero-centred gamma, fault)."""
    import transformer_engine.pytorch as te

    kind, zero_centered, fault = payload
    module = getattr(te, kind)(
        hidden_size=6,
        eps=1e-2 if fault == "epsilon" else 1e-5,
        zero_centered_gamma=zero_centered != (fault == "gamma"),
        params_dtype=torch.float64,
        device="cpu",
    )
    return module_gap(module, normed(kind, zero_centered), draw(3, 2, 6))


def normed(kind: str, zero_centered: bool) -> Callable[..., Tensor]:
    def oracle(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        gamma = weight + 1 if zero_centered else weight
        if kind == "RMSNorm":
            return F.rms_norm(x, (x.shape[-1],), gamma, 1e-5)
        return F.layer_norm(x, (x.shape[-1],), gamma, bias, 1e-5)

    return oracle


def bf16_norm(fault: str | None, _context: RankContext) -> float:
    """Largest error of RMSNorm in bfloat16, relative to 2^-8, half a unit in the last place of a power of two."""
    import transformer_engine.pytorch as te

    x, weight = draw(64, 32).bfloat16(), draw(32).bfloat16()
    module = te.RMSNorm(hidden_size=32, eps=1e-5, params_dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        module.weight.copy_(weight)
        ours = module(x)
        if fault == "narrow":
            ours = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
    truth = F.rms_norm(x.double(), (32,), weight.double(), 1e-5)
    return float(((ours.double() - truth).abs() / truth.abs()).max() * 2**8)


def linear(payload: tuple[str, bool, str | None], _context: RankContext) -> float:
    """(Linear or a LayerNormLinear's normalization, bias, fault)."""
    import transformer_engine.pytorch as te

    kind, bias, fault = payload
    common: dict[str, Any] = {
        "bias": bias,
        "params_dtype": torch.float64,
        "device": "cpu",
        "init_method": nn.init.ones_,
    }
    x = draw(3, 2, 6)
    if kind == "Linear":
        module = te.Linear(6, 4, **common)

        def oracle(x: Tensor, *parameters: Tensor) -> Tensor:
            return F.linear(x, *parameters) * (1.001 if fault else 1.0)

        return module_gap(module, oracle, x)
    module = te.LayerNormLinear(6, 4, eps=1e-2 if fault else 1e-5, normalization=kind, **common)
    names = [name for name, _ in module.named_parameters()]

    def normed_oracle(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        hidden = normed(kind, False)(x, given["layer_norm_weight"], given.get("layer_norm_bias"))
        return F.linear(hidden, given["weight"], given.get("bias"))

    return module_gap(module, normed_oracle, x)


def grouped(payload: tuple[bool, str | None], _context: RankContext) -> float:
    """(bias, fault): three experts, of which the second gets no token."""
    import transformer_engine.pytorch as te

    bias, fault = payload
    splits = [3, 0, 2]
    module = te.GroupedLinear(3, 6, 4, bias=bias, params_dtype=torch.float64, device="cpu", init_method=nn.init.ones_)
    names = [name for name, _ in module.named_parameters()]
    order = {"shuffled": (2, 1, 0)}.get(fault or "", (0, 1, 2))

    def oracle(x: Tensor, *parameters: Tensor) -> Tensor:
        given = dict(zip(names, parameters, strict=True))
        parts = zip(order, torch.split(x, splits), strict=True)
        return torch.cat([F.linear(part, given[f"weight{i}"], given.get(f"bias{i}")) for i, part in parts])

    return module_gap(module, oracle, draw(5, 6), splits)


def weight_marks(parallel_mode: str, _context: RankContext) -> dict[str, object]:
    """What megatron-core's optimizer and checkpoints read off the parameters."""
    import transformer_engine.pytorch as te

    group = object()  # not used before forward
    layer = te.Linear(
        8, 8, sequence_parallel=True, tp_group=group, tp_size=2, parallel_mode=parallel_mode,
        init_method=nn.init.ones_, params_dtype=torch.float32, device="cpu",
    )  # fmt: skip
    marks = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    facts: dict[str, object] = {"shape": tuple(layer.weight.shape)}
    for name, parameter in layer.named_parameters():
        facts[name] = {mark: getattr(parameter, mark) for mark in marks if hasattr(parameter, mark)}
    return facts


def streams(_: object, _context: RankContext) -> list[object]:
    """The random streams that a weight is drawn from: the one that is named, or the tracker's own default."""
    import transformer_engine.pytorch as te

    class Tracker:
        forks: list[object] = []  # noqa: RUF012

        @contextlib.contextmanager
        def fork(self, name: str = "default") -> Iterator[None]:
            self.forks.append(name)
            yield

    common: dict[str, Any] = {"get_rng_state_tracker": Tracker, "init_method": nn.init.ones_, "device": "cpu"}
    te.Linear(2, 2, params_dtype=torch.float32, **common)
    te.Linear(2, 2, params_dtype=torch.float32, rng_tracker_name="expert", **common)
    te.GroupedLinear(2, 2, 2, params_dtype=torch.float32, rng_tracker_name="expert", **common)
    return list(Tracker.forks)


# --- attention

HEADS, GROUPS, KEY_CHANNELS, VALUE_CHANNELS = 4, 2, 6, 5
Layout = Literal["sbhd", "bshd", "thd"]


@dataclass(frozen=True)
class Case:
    """Attention over `lengths` tokens per sequence, in room for `room` tokens each."""

    layout: Layout
    mask_type: str
    lengths: tuple[int, ...]
    room: tuple[int, ...]
    fault: str | None = None


#: Packed sequences with room between them.
SPACED = Case("thd", "padding_causal", (5, 8, 1), (8, 8, 4))


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes) + 1)]


def layer_of(**more: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    channels = (KEY_CHANNELS, VALUE_CHANNELS)
    layer: nn.Module = te.DotProductAttention(HEADS, channels, num_gqa_groups=GROUPS, **more)
    return layer


def inputs_of(tokens: int) -> list[Tensor]:
    """Query, key and value of a stream of tokens."""
    shapes = ((HEADS, KEY_CHANNELS), (GROUPS, KEY_CHANNELS), (GROUPS, VALUE_CHANNELS))
    return [draw(tokens, *shape, seed=i) for i, shape in enumerate(shapes)]


def oracle_of(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's own attention on each sequence alone, without its padding; zeros where padding. (tokens, heads * dv)"""
    parts = []
    for start, length, room in zip(_offsets(case.room), case.lengths, case.room, strict=False):
        q, k, v = (x[start : start + length].transpose(0, 1) for x in (query, key, value))
        causal = "causal" in case.mask_type
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        parts.append(F.pad(out.transpose(0, 1).flatten(1), (0, 0, 0, room - length)))
    return torch.cat(parts)


def ours_of(case: Case, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The layer on the whole batch at once, in the layout of the case; result as the oracle's."""
    mask_type = "padding" if case.fault == "mask" else case.mask_type
    if case.fault == "groups":
        key = key.flip(1)
    if case.layout == "thd":
        room = torch.tensor(_offsets(case.room), dtype=torch.int32)
        valid = room if case.fault == "padding" else torch.tensor(_offsets(case.lengths), dtype=torch.int32)
        seqlens = {"cu_seqlens_q": valid, "cu_seqlens_kv": valid}
        if case.lengths != case.room:
            seqlens |= {"cu_seqlens_q_padded": room, "cu_seqlens_kv_padded": room}
        longest = {"max_seqlen_q": max(case.room), "max_seqlen_kv": max(case.room)}
        packed: Tensor = layer(query, key, value, None, qkv_format="thd", attn_mask_type=mask_type, **seqlens, **longest)
        return packed
    batch, room_each = len(case.room), case.room[0]
    padding = torch.arange(room_each) >= torch.tensor(case.lengths)[:, None]
    lookahead = torch.ones(room_each, room_each, dtype=torch.bool).triu(1)
    mask: Tensor | None = padding[:, None, None, :]
    if mask_type == "arbitrary":
        mask = padding[:, None, None, :] | lookahead
    elif mask_type in ("causal", "no_mask"):
        mask = None
    batched = [x.reshape(batch, room_each, *x.shape[1:]) for x in (query, key, value)]
    batched = [x.transpose(0, 1) for x in batched] if case.layout == "sbhd" else batched
    result: Tensor = layer(*batched, mask, qkv_format=case.layout, attn_mask_type=mask_type)
    return (result.transpose(0, 1) if case.layout == "sbhd" else result).flatten(0, 1)


def valid_of(case: Case) -> Tensor:
    """Which tokens of the stream are not padding."""
    parts = [torch.arange(room) < length for length, room in zip(case.lengths, case.room, strict=True)]
    return torch.cat(parts)


def attention(case: Case, _context: RankContext) -> float:
    """One rank against torch's attention, over valid tokens."""
    layer = layer_of(softmax_scale=0.5 if case.fault == "scale" else None)
    inputs = inputs_of(sum(case.room))
    valid = valid_of(case)
    cotangent = draw(len(valid), HEADS * VALUE_CHANNELS) * valid[:, None]
    mask_for = _with_arbitrary_as_causal(case)
    ours = outcome(lambda *qkv: ours_of(case, layer, *qkv), inputs, cotangent)
    truth = outcome(lambda *qkv: oracle_of(mask_for, *qkv), inputs, cotangent)
    return gap([x[valid] for x in ours], [x[valid] for x in truth])


def _with_arbitrary_as_causal(case: Case) -> Case:
    """The arbitrary mask of `_ours` is causal."""
    kind = "padding_causal" if case.mask_type == "arbitrary" else case.mask_type
    return Case(case.layout, kind, case.lengths, case.room)


def padding_influence(case: Case, _context: RankContext) -> float:
    """How much valid outputs and gradients change when padding is multiplied by a thousand."""
    layer = layer_of()
    valid = valid_of(case)
    cotangent = draw(len(valid), HEADS * VALUE_CHANNELS) * valid[:, None]
    inputs = inputs_of(len(valid))
    changed = [torch.where(valid[:, None, None], x, 1000 * x) for x in inputs]
    if case.fault == "attended":
        changed[1][:1] *= 1.001  # as if the first token were padding
    one, other = (outcome(lambda *qkv: ours_of(case, layer, *qkv), given, cotangent) for given in (inputs, changed))
    return gap([x[valid] for x in one], [x[valid] for x in other])


def nothing_to_look_at(_: object, _context: RankContext) -> tuple[float, bool]:
    """Largest output of a query that may look nowhere, and whether all gradients are finite."""
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    mask[:, :, 1] = True
    q, k, v = (x[None].requires_grad_() for x in inputs_of(4))
    out = layer_of()(q, k, v, mask, qkv_format="bshd", attn_mask_type="arbitrary")
    out.sum().backward()
    finite = all(bool(x.grad.isfinite().all()) for x in (q, k, v) if x.grad is not None)
    return float(out[:, 1].abs().max()), finite


# --- context parallelism


def share_of(x: Tensor, case: Case, context: RankContext) -> Tensor:
    """This rank's tokens of a stream: chunks r and 2 * cp - 1 - r of each sequence."""
    cp, r = context.world_size, context.rank
    held = []
    for start, room in zip(_offsets(case.room), case.room, strict=False):
        chunks = x[start : start + room].chunk(2 * cp)
        held += [chunks[2 * r], chunks[2 * r + 1]] if case.fault == "layout" else [chunks[r], chunks[2 * cp - 1 - r]]
    return torch.cat(held)


@contextlib.contextmanager
def group(context: RankContext) -> Iterator[Any]:
    """The default process group, on gloo."""
    dist.init_process_group("gloo", init_method=context.rendezvous, rank=context.rank, world_size=context.world_size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def context_attention(case: Case, context: RankContext) -> float:
    """Each rank's part of output and gradients against the same part of torch's attention on one rank."""
    inputs = inputs_of(sum(case.room))
    valid = valid_of(case)
    cotangent = draw(len(valid), HEADS * VALUE_CHANNELS) * valid[:, None]
    truth = outcome(lambda *qkv: oracle_of(case, *qkv), inputs, cotangent)
    with group(context) as world:
        if case.fault == "unsummed":
            _leave_gradients_unsummed(context)
        layer = layer_of(cp_group=world, cp_global_ranks=list(range(context.world_size)), cp_comm_type="p2p")

        def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if case.layout == "thd":
                return ours_of(case, layer, query, key, value)
            local = tuple(room // context.world_size for room in case.room)
            return ours_of(Case(case.layout, case.mask_type, local, local), layer, query, key, value)

        mine = outcome(ours, [share_of(x, case, context) for x in inputs], share_of(cotangent, case, context))
    seen = share_of(valid, case, context)
    return gap([x[seen] for x in mine], [share_of(x, case, context)[seen] for x in truth])


def _leave_gradients_unsummed(context: RankContext) -> None:
    """Each rank keeps the gradients of keys and values that its own queries give."""
    from megatron.core.tensor_parallel import mappings

    def own_part(output: Tensor, whole: Tensor, **_: object) -> None:
        output.copy_(whole.chunk(context.world_size)[context.rank])

    dist.all_reduce = lambda *_args, **_kwargs: None
    mappings.dist_reduce_scatter_func = own_part
