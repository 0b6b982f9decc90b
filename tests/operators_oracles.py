"""Oracles that nobody here wrote: torch's own functions, and the CPU references of the PyPI package mindstudio-probe."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from conformance.operators import moe
from conformance.operators.attention import AttentionCase, allowed, joined, members
from conformance.operators.elementwise import AdamWCase, RotaryCase
from conformance.operators.matmul import GroupedCase

HOW = "no mindstudio-probe here: pip install --no-deps mindstudio-probe==26.2.0"


@cache
def mindstudio(name: str) -> ModuleType:
    """The file `msprobe/pytorch/bench_functions/<name>.py` of the installed package; skips the test where it is absent.

    The file alone: the package's own imports want matplotlib and more, of which the references use a logger and constants.
    """
    try:
        files = importlib.metadata.files("mindstudio-probe") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(HOW)
    if name == "npu_fusion_attention" and importlib.util.find_spec("einops") is None:
        pytest.skip("mindstudio-probe's attention wants einops: pip install einops")
    (found,) = (f for f in files if str(f) == f"msprobe/pytorch/bench_functions/{name}.py")
    stand_ins: dict[str, Any] = {
        "msprobe.pytorch.common.utils": SimpleNamespace(logger=logging.getLogger("mindstudio")),
        "msprobe.core.common.const": SimpleNamespace(Const=None, CompareConst=None),
    }
    before = set(sys.modules)
    sys.modules.update({key: value for key, value in stand_ins.items() if key not in before})
    try:
        return _load(Path(str(found.locate())))
    finally:
        for key in stand_ins:
            if key not in before:
                del sys.modules[key]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mindstudio_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sdpa(case: AttentionCase, tensors: Sequence[Tensor]) -> Tensor:
    """`scaled_dot_product_attention` on each member, with torch's own causal masks for sparse modes 2 and 3."""
    q, k, v = tensors
    parts = zip(
        members(q, case.layout, case.queries, case.heads),
        members(k, case.layout, case.keys, case.kv_heads),
        members(v, case.layout, case.keys, case.kv_heads),
        strict=True,
    )
    outputs = []
    for m, (a, b, c) in enumerate(parts):
        seen = allowed(case, m)
        causal = {2: causal_upper_left, 3: causal_lower_right}.get(case.mode) if case.mask == "triangle" else None
        if a.shape[1] > b.shape[1] and case.mode == 3:  # torch's has no answer for queries without keys, and warns
            causal = None
        mask: Any = seen[None] if causal is None else causal(a.shape[1], b.shape[1])
        out = F.scaled_dot_product_attention(a[None], b[None], c[None], mask, scale=case.scale, enable_gqa=True)[0]
        outputs.append(torch.where(seen.any(-1, keepdim=True), out, 0.0))
    return joined(outputs, case)


def turned(case: RotaryCase, x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding as a product of complex numbers; `angles` has one entry per pair."""
    pairs = torch.stack(x.chunk(2, -1), -1) if case.mode == "half" else x.unflatten(-1, (-1, 2))
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angles), angles))
    return torch.cat(product.unbind(-1), -1) if case.mode == "half" else product.flatten(-2)


def tables(case: RotaryCase, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines with an entry per element of a head."""
    spread = torch.cat((angles, angles), -1) if case.mode == "half" else angles.repeat_interleave(2, -1)
    return spread.cos(), spread.sin()


def torch_adamw(case: AdamWCase, state: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """`torch.optim.AdamW`, taken up after `case.before` updates."""
    p = torch.nn.Parameter(state[0].clone())
    optimizer = torch.optim.AdamW(
        [p],
        lr=case.lr,
        betas=case.betas,
        weight_decay=case.weight_decay,
        eps=case.epsilon,
        amsgrad=case.amsgrad,
        maximize=case.maximize,
    )
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if case.amsgrad else 2]
    optimizer.state[p] = {"step": torch.tensor(float(case.before))} | {
        n: s.clone() for n, s in zip(names, state[1:], strict=False)
    }
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    return [p.detach(), *(optimizer.state[p][n] for n in names[:2])]


def torch_grouped(case: GroupedCase, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` for each expert."""
    rows = x.split(case.counts)
    biases = [None] * len(rows) if bias is None else list(bias)
    return torch.cat([F.linear(r, m.T, b) for r, m, b in zip(rows, w, biases, strict=True)])


def torch_unpermute(case: moe.MoeCase, rows: Tensor, order: Tensor, probs: Tensor) -> Tensor:
    """`embedding_bag`: each token is a bag of rows with weights."""
    bags = order.long().view(case.tokens, case.chosen)
    return F.embedding_bag(bags, rows, mode="sum", per_sample_weights=probs)
