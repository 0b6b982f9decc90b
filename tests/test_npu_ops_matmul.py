"""Grouped products, AdamW, MindSpeed's compiled kernels, and products fused with a collective."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_npu_ops_support import Trace, close, load_ops, ops, randn, run
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

from conformance.npu.kernels import kernels

pytestmark = pytest.mark.stack

npu = torch.ops.npu
COUNTS = torch.tensor([2, 0, 3])
TOTALS = COUNTS.cumsum(0)
X, W = randn(5, 4), randn(3, 4, 6, seed=2)


def grouped_reference(x: Tensor, w: Tensor) -> Tensor:
    group = torch.repeat_interleave(torch.arange(3), COUNTS)
    return torch.einsum("tk,tkn->tn", x, w[group])


@pytest.mark.parametrize("groups", [{"group_list": COUNTS, "group_list_type": 1}, {"group_list": TOTALS}])
@pytest.mark.parametrize("weight", [[W], list(W)], ids=["one", "list"])
def test_rows_in_groups(groups: dict[str, Any], weight: list[Tensor]) -> None:
    for split_item in (2, 3):
        out = npu.npu_grouped_matmul([X], weight, bias=None, split_item=split_item, group_type=0, **groups)
        close(out, [grouped_reference(X, W)], 1e-12)


def test_contraction_in_groups_is_the_weights_gradient() -> None:
    _, _, dw = run(grouped_reference, (X, W))
    grad = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options = {"group_list": COUNTS, "group_list_type": 1, "group_type": 2}
    close(npu.npu_grouped_matmul([X.T], [grad], split_item=3, **options), [dw], 1e-12)
    assert not dw[1].any()
    with pytest.raises(AssertionError, match="off by"):
        close(npu.npu_grouped_matmul([X.T], [grad.flip(0)], split_item=3, **options), [dw], 1e-12)


def test_counts_taken_for_totals_are_caught() -> None:
    with pytest.raises(RuntimeError, match="negative group"):
        npu.npu_grouped_matmul([X], [W], split_item=2, group_type=0, group_list=COUNTS, group_list_type=0)


def test_ungrouped_and_list_overload() -> None:
    xs, ws = [randn(2, 4), randn(3, 4)], [randn(4, 6), randn(4, 5)]
    close(npu.npu_grouped_matmul(xs, ws, group_type=-1), [x @ w for x, w in zip(xs, ws, strict=True)], 1e-12)
    bias = [randn(6), randn(6, seed=3)]
    got = npu.npu_grouped_matmul([X], [W[0], W[1]], bias=bias, group_list=[2, 5], split_item=2)
    want = X[:2] @ W[0] + bias[0], X[2:] @ W[1] + bias[1]
    close(got, [torch.cat(want)], 1e-12)
    close(npu.npu_grouped_matmul([X], [W[0], W[1]], bias=bias, group_list=[2, 5], split_item=1), want, 1e-12)


def test_grouped_product_is_traced_and_not_differentiable() -> None:
    with Trace() as trace:
        out = npu.npu_grouped_matmul([X], [W], group_list=COUNTS, group_list_type=1, split_item=2, group_type=0)
    assert trace.names == ["npu_grouped_matmul"]
    assert out[0].grad_fn is None


GROUPED = {"group_list": COUNTS, "group_list_type": 1, "split_item": 2, "group_type": 0}
FORBIDDEN: list[tuple[str, dict[str, Any]]] = [
    ("covers 4 of 5 rows", {"group_list": torch.tensor([2, 0, 2])}),
    ("negative group", {"group_list": torch.tensor([6, -4, 3])}),
    ("weights for 2 groups", {"group_list": torch.tensor([2, 3])}),
    ("must be int64", {"group_list": COUNTS.int()}),
    ("one dtype", {"weight": [W.float()]}),
    ("do not multiply", {"weight": [W.transpose(1, 2)]}),
    ("needs a group_list", {"group_list": None}),
    ("-1, 0 and 2, but got None", {"group_type": None}),
    ("takes split_item 2 or 3", {"split_item": 1}),
]


@pytest.mark.parametrize(("sentence", "change"), FORBIDDEN, ids=[s for s, _ in FORBIDDEN])
def test_forbidden_inputs(sentence: str, change: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        npu.npu_grouped_matmul(**{"x": [X], "weight": [W], **GROUPED, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"group_type": 1},
        {"group_list_type": 2},
        {"act_type": 1},
        {"output_dtype": 6},
        {"scale": [X]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_unsupported_values_are_named(change: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"npu_grouped_matmul does not support {next(iter(change))}="):
        npu.npu_grouped_matmul([X], [W], **{**GROUPED, **change})


def adamw_reference(steps: int, **options: Any) -> list[Tensor]:
    param = torch.nn.Parameter(randn(7))
    optimizer = torch.optim.AdamW([param], lr=0.1, betas=(0.9, 0.95), weight_decay=0.3, eps=1e-3, **options)
    for step in range(steps):
        param.grad = randn(7, seed=10 + step)
        optimizer.step()
    state = optimizer.state[param]
    return [param.detach(), state["exp_avg"], state["exp_avg_sq"]]


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_adam_w(options: dict[str, bool]) -> None:
    state, largest = [randn(7), torch.zeros(7).double(), torch.zeros(7).double()], torch.zeros(7).double()
    ams, up = options.get("amsgrad", False), options.get("maximize", False)
    for step in range(3):
        numbers = 0.9**step, 0.95**step, 0.1, 0.3, 0.9, 0.95, 1e-3
        npu.npu_apply_adam_w(*numbers, randn(7, seed=10 + step), largest, ams, up, out=state)
    close(state, adamw_reference(3, **options), 1e-12)
    with pytest.raises(AssertionError, match="off by"):
        close(state, adamw_reference(2, **options), 1e-12)
    with pytest.raises(RuntimeError, match="not implemented for Tensor"):
        npu.npu_apply_adam_w(*numbers, randn(7), None, False, False)


KERNELS: dict[str, Any] = kernels(ops)


def test_kernel_adamw() -> None:
    state = [randn(7), torch.zeros(7).double(), torch.zeros(7).double()]
    kernel = KERNELS["npu_apply_fused_adamw_v2"].npu_apply_fused_adamw_v2
    for step in range(3):
        rest = torch.tensor([step + 1]), 0.1, 0.9, 0.95, 0.3, 1e-3
        kernel(state[0], randn(7, seed=10 + step), state[1], state[2], torch.ones(1), *rest, False, False)
    close(state, adamw_reference(3), 1e-12)
    with pytest.raises(NotImplementedError, match="amsgrad=True"):
        kernel(state[0], randn(7), state[1], state[2], torch.ones(1), *rest, True, False)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("name", "groups", "kind"),
    [("grouped_matmul", TOTALS.tolist(), 0), ("grouped_matmul", TOTALS, 0), ("grouped_matmul_v2", COUNTS, 1)],
)
def test_kernel_grouped_matmul(name: str, groups: Any, kind: int, transposed: bool) -> None:
    weight = W.transpose(1, 2).contiguous().transpose(1, 2) if transposed else W
    kernel = KERNELS[name]
    out, dx, dw = run(grouped_reference, (X, weight))
    grad = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    close(kernel.npu_gmm([X], [weight], [], groups, 0, kind), [out], 1e-12)
    got_dx, got_dw, dbias = kernel.npu_gmm_backward([grad], [X], [weight], groups, kind)
    close([*got_dx, *got_dw], [dx, dw], 1e-12)
    assert dbias == []
    fused = kernel.npu_gmm_backward_fusion([grad], [weight], groups, kind)
    close(fused[0], [dx], 1e-12)
    assert fused[1:] == ([], [])


def test_kernels_that_accumulate_weight_gradients() -> None:
    dy, x, total = randn(5, 6).float(), X.float(), torch.ones(6, 4)
    KERNELS["npu_matmul_add_fp32"].npu_matmul_add_fp32(dy, x, total)
    close(total, 1 + dy.T @ x, 1e-6)
    flat = torch.ones(4, 18)  # as Megatron keeps it: (E, K, N) only in memory
    KERNELS["npu_groupmatmul_add_fp32"].npu_groupmatmul_add_fp32(x, dy, TOTALS, flat)
    want = torch.stack([x[a:b].T @ dy[a:b] for a, b in ((0, 2), (2, 2), (2, 5))])
    close(flat.view(3, 4, 6), 1 + want, 1e-6)
    with pytest.raises(AssertionError, match="off by"):
        close(flat.view(3, 4, 6), want, 1e-6)
    for name, call in (("npu_matmul_add_fp32", (dy, x)), ("npu_groupmatmul_add_fp32", (x, dy, TOTALS))):
        with pytest.raises(RuntimeError, match="must be float32"):
            getattr(KERNELS[name], name)(*call, total.bfloat16())


@pytest.mark.parametrize(("mode", "name"), [(0, "half"), (1, "interleave")])
def test_kernel_rotary_agrees_with_the_operator(mode: int, name: str) -> None:
    inputs = randn(5, 2, 3, 8), randn(5, 1, 1, 8, seed=2), randn(5, 1, 1, 8, seed=3)
    kernel = KERNELS["npu_rotary_position_embedding"].npu_rotary_position_embedding
    close(run(lambda *t: kernel(*t, mode), inputs), run(lambda *t: npu.npu_rotary_mul(*t, name), inputs), 1e-12)
    with pytest.raises(AssertionError, match="off by"):
        close(kernel(*inputs, 1 - mode), npu.npu_rotary_mul(*inputs, name), 1e-12)
    with pytest.raises(RuntimeError, match="must be 0 or 1"):
        kernel(*inputs, 2)


def ring_update(layout: str, ends: Tensor | None) -> None:
    """Attention over two halves of the keys, merged by the kernel, equals attention over all of them."""
    options: dict[str, Any] = {"scale": 0.4}
    if layout == "TND":
        q, k, v = randn(8, 2, 4), randn(8, 2, 4, seed=2), randn(8, 2, 4, seed=3)
        options |= {"actual_seq_qlen": [2, 8], "actual_seq_kvlen": [4, 8]}
        half = {**options, "actual_seq_kvlen": [2, 4]}
        halves = [torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])]
    else:
        q, k, v = randn(3, 2, 8), randn(6, 2, 8, seed=2), randn(6, 2, 8, seed=3)
        half, halves = options, [torch.arange(3), torch.arange(3, 6)]
    whole = npu.npu_fusion_attention(q, k, v, 2, layout, **options)[:3]
    parts = [npu.npu_fusion_attention(q, k[part], v[part], 2, layout, **half)[:3] for part in halves]
    kernel = KERNELS["npu_ring_attention_update"].npu_ring_attention_update
    close(kernel(*parts[0], *parts[1], ends, layout), whole, 1e-11)


def test_kernel_ring_update() -> None:
    ring_update("SBH", None)
    ring_update("TND", torch.tensor([0, 2, 8]))
    with pytest.raises(AssertionError, match="off by"):
        ring_update("TND", torch.tensor([0, 4, 8]))
    with pytest.raises(NotImplementedError, match="layout='BNSD'"):
        KERNELS["npu_ring_attention_update"].npu_ring_attention_update(*[randn(1, 1, 1, 8)] * 6, None, "BNSD")


# Products fused with a collective: two ranks over gloo.


def _rank(rank: int, meeting: str, skew: bool) -> None:
    load_ops()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    groups = ModuleType("torch_npu._groups")
    groups.group_of = {"tp": dist.group.WORLD}.__getitem__  # type: ignore[attr-defined]
    sys.modules["torch_npu._groups"] = groups
    everyone = [(randn(4, 6, seed=r).float(), randn(6, 8, seed=5 + r).float()) for r in range(2)]
    x, w = everyone[rank]
    row = 1 - rank if skew else rank
    (a, b), (c, d) = everyone
    summed = a @ b + c @ d
    with Trace() as trace:
        product, gathered = npu.npu_all_gather_base_mm(x, w, "tp", 2)
        scattered = npu.npu_mm_reduce_scatter_base(x, w, "tp", 2, reduce_op="sum")
        reduced = npu.npu_mm_all_reduce_base(x, w, "tp", bias=torch.ones(8))
    close(gathered, torch.cat([a for a, _ in everyone]), 0)
    close(product, gathered @ w, 1e-6)
    close(scattered, summed[2 * row : 2 * row + 2], 1e-6)
    close(reduced, summed + 2, 1e-6)
    close(npu.npu_mm_all_reduce_base(x.view(2, 2, 6), w, "tp"), summed.view(2, 2, 8), 1e-6)
    assert npu.npu_all_gather_base_mm(x, w, "tp", 2, gather_output=False)[1].numel() == 0
    assert trace.names == ["npu_all_gather_base_mm", "npu_mm_reduce_scatter_base", "npu_mm_all_reduce_base"]
    half = npu.npu_mm_reduce_scatter_base(x.bfloat16(), w.bfloat16(), "tp", 2)
    close(half, summed[2 * row : 2 * row + 2], 2e-2)
    with pytest.raises(RuntimeError, match="the group has 2 ranks"):
        npu.npu_all_gather_base_mm(x, w, "tp", 4)
    with pytest.raises(RuntimeError, match="do not split over 2"):
        npu.npu_mm_reduce_scatter_base(x[:3], w, "tp", 2)
    for name, value in (("gather_index", 1), ("comm_turn", 2), ("comm_mode", "aiv")):
        with pytest.raises(NotImplementedError, match=f"npu_all_gather_base_mm does not support {name}="):
            npu.npu_all_gather_base_mm(x, w, "tp", 2, **{name: value})
    with pytest.raises(NotImplementedError, match="reduce_op='max'"):
        npu.npu_mm_all_reduce_base(x, w, "tp", reduce_op="max")
    dist.destroy_process_group()


def test_what_hardware_does_not_take_and_the_emulation_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension that mc2's docstring tells: float32, and a contraction below 256. Nothing else goes with it."""
    assert list(ops.mc2.EXTRA_DTYPES) == [torch.float32]
    alone = SimpleNamespace(wait=lambda: None)
    group = SimpleNamespace(
        size=lambda: 1,
        _allgather_base=lambda gathered, rows: gathered.copy_(rows) is None or alone,
        _reduce_scatter_base=lambda out, partial: out.copy_(partial) is None or alone,
        allreduce=lambda _: alone,
    )
    monkeypatch.setattr(ops.mc2, "_group", lambda _: group)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x, w = randn(2, 3, dtype=dtype), randn(3, 4, dtype=dtype)
        for got in (
            npu.npu_all_gather_base_mm(x, w, "tp", 1)[0],
            npu.npu_mm_reduce_scatter_base(x, w, "tp", 1),
            npu.npu_mm_all_reduce_base(x, w, "tp"),
        ):
            close(got, (x.double() @ w.double()).to(dtype), 0 if dtype != torch.float32 else 1e-6)
    for dtype in (torch.float64, torch.int32, torch.int8):
        with pytest.raises(RuntimeError, match="must be float16 or bfloat16"):
            npu.npu_all_gather_base_mm(torch.ones(2, 3, dtype=dtype), torch.ones(3, 4, dtype=dtype), "tp", 1)


start: Any = start_processes


def test_fused_collectives(tmp_path: Path) -> None:
    start(_rank, (str(tmp_path / "meeting"), False), nprocs=2, start_method="fork")


def test_rows_of_another_rank_are_caught(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedException, match="off by"):
        start(_rank, (str(tmp_path / "meeting"), True), nprocs=2, start_method="fork")


def test_group_is_looked_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu._groups", SimpleNamespace(group_of=lambda name: f"group {name}"))
    assert ops.mc2._group("x") == "group x"
