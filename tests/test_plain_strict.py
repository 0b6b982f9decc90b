"""The plain backend refuses, by name, what it does not honour; and it does not take a real Transformer Engine's place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from plain_oracle import draw, plain_package

from conformance import plain

pytestmark = pytest.mark.stack

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def te() -> Iterator[ModuleType]:
    with plain_package() as package:
        yield package


MAKERS: dict[str, Callable[..., Any]] = {
    "Linear": lambda te, **kw: te.Linear(4, 4, **kw),
    "LayerNormLinear": lambda te, **kw: te.LayerNormLinear(4, 4, **kw),
    "GroupedLinear": lambda te, **kw: te.GroupedLinear(2, 4, 4, **kw),
    "RMSNorm": lambda te, **kw: te.RMSNorm(4, **kw),
    "LayerNorm": lambda te, **kw: te.LayerNorm(4, **kw),
    "DotProductAttention": lambda te, **kw: te.DotProductAttention(2, 4, **kw),
    "fp8_autocast": lambda te, **kw: te.fp8_autocast(**kw),
    "fp8_model_init": lambda te, **kw: te.fp8_model_init(**kw),
}
UNSUPPORTED: list[tuple[str, dict[str, Any]]] = [
    *((name, {"no_such_argument": 1}) for name in list(MAKERS)[:6]),
    *(
        (name, {argument: value})
        for name in ("Linear", "LayerNormLinear", "GroupedLinear")
        for argument, value in (
            ("fuse_wgrad_accumulation", True),
            ("delay_wgrad_compute", True),
            ("ub_overlap_ag", True),
            ("symmetric_ar_type", "two_shot"),
            ("parallel_mode", "diagonal"),
            ("tp_size", 2),
        )
    ),
    ("LayerNormLinear", {"parallel_mode": "row"}),
    ("LayerNormLinear", {"normalization": "BatchNorm"}),
    ("DotProductAttention", {"attention_dropout": 0.1}),
    ("DotProductAttention", {"attention_type": "cross"}),
    ("DotProductAttention", {"cp_comm_type": "a2a"}),
    ("DotProductAttention", {"window_size": (4, 0)}),
    ("DotProductAttention", {"softmax_type": "learnable"}),
    ("DotProductAttention", {"return_max_logit": True}),
    ("DotProductAttention", {"attn_mask_type": "arbitary"}),
    ("fp8_autocast", {"enabled": True}),
    ("fp8_model_init", {"enabled": True}),
]


@pytest.mark.parametrize(("name", "arguments"), UNSUPPORTED, ids=lambda x: x if isinstance(x, str) else next(iter(x)))
def test_unsupported_argument_is_refused_by_name(te: ModuleType, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(te.linear.PlainBackendError, match=next(iter(arguments))):
        MAKERS[name](te, **arguments)


@pytest.mark.parametrize("name", MAKERS)
def test_neutral_arguments_are_taken(te: ModuleType, name: str) -> None:
    neutral: dict[str, Any] = {}
    if name.startswith("fp8"):
        neutral = {"enabled": False}
    elif "Linear" in name:
        neutral = te.linear.NEUTRAL
    elif name == "DotProductAttention":
        neutral = {"window_size": None, "softmax_type": "vanilla", "return_max_logit": False}
    MAKERS[name](te, **neutral)


def test_a_lenient_refuse_is_caught(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: arguments that are not honoured are taken."""
    monkeypatch.setattr(te.linear, "refuse", lambda *_: None)
    with pytest.raises(pytest.fail.Exception):
        test_unsupported_argument_is_refused_by_name(te, "Linear", {"no_such_argument": 1})


CU, OTHER = torch.tensor([0, 2, 6]), torch.tensor([0, 3, 6])
FORWARD: list[tuple[str, dict[str, Any]]] = [
    ("no_such_argument", {"no_such_argument": 1}),
    ("num_splits", {"num_splits": 1}),
    ("core_attention_bias_type", {"core_attention_bias_type": "alibi"}),
    ("core_attention_bias", {"core_attention_bias": torch.zeros(1, 2, 6, 6)}),
    ("attn_mask_type", {"attn_mask_type": "causal_bottom_right"}),
    ("qkv_format", {"qkv_format": "hdbs"}),
    ("padding_causal needs an attention_mask", {"attn_mask_type": "padding_causal"}),
    ("arbitrary needs an attention_mask", {"attn_mask_type": "arbitrary"}),
    ("cu_seqlens", {"qkv_format": "thd"}),
    ("cu_seqlens", {"qkv_format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": OTHER}),
    ("cu_seqlens", {"qkv_format": "thd", "cu_seqlens_q": CU, "cu_seqlens_kv": CU, "cu_seqlens_q_padded": OTHER}),
]


@pytest.mark.parametrize(("text", "arguments"), FORWARD)
def test_attention_forward_refuses(te: ModuleType, text: str, arguments: dict[str, Any]) -> None:
    shape = (6, 2, 4) if arguments.get("qkv_format") == "thd" else (6, 1, 2, 4)
    q, k, v = (draw(*shape, seed=i) for i in range(3))
    with pytest.raises(te.linear.PlainBackendError, match=text):
        te.DotProductAttention(2, 4)(q, k, v, **arguments)


@pytest.mark.parametrize("splits", [[1, 2], [1, 1, 1], [4, -1]])
def test_splits_that_do_not_fit_are_refused(te: ModuleType, splits: list[int]) -> None:
    layer = te.GroupedLinear(3 if len(splits) == 2 else 2, 4, 4)
    with pytest.raises(te.linear.PlainBackendError, match="m_splits"):
        layer(torch.zeros(3, 4), splits)


def test_indivisible_sequence_is_refused(te: ModuleType) -> None:
    with pytest.raises(te.linear.PlainBackendError, match="6 tokens do not divide into 4 chunks"):
        te.attention.positions(6, 0, 2)


def test_fp8_and_the_rng_tracker_raise(te: ModuleType) -> None:
    from transformer_engine.common import recipe

    calls: list[Callable[[], Any]] = [
        recipe.DelayedScaling,
        recipe.Float8CurrentScaling,
        te.fp8.FP8GlobalStateManager.get_fp8_recipe,
        te.distributed.CudaRNGStatesTracker,
        te.distributed.checkpoint,
        te.distributed.get_all_rng_states,
        te.ops.Sequential,
    ]
    for call in calls:
        with pytest.raises(te.linear.PlainBackendError):
            call()
    assert not te.fp8.FP8GlobalStateManager.is_fp8_enabled()


# --- activate()

ACTIVATE = """
from conformance import plain
from conformance.errors import UsageFault
try:
    plain.activate()
    plain.activate()
except UsageFault as fault:
    print("refused:", fault)
else:
    import sys, transformer_engine
    print("plain:", transformer_engine.__file__, sys.path.count(str(plain.PATH)))
"""


def activate_in_a_process(*path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(p) for p in (*path, ROOT)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ACTIVATE], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_activate_puts_the_package_on_the_path_once() -> None:
    assert activate_in_a_process() == f"plain: {plain.PATH / 'transformer_engine' / '__init__.py'} 1"


@pytest.mark.parametrize("namespace", [False, True], ids=["package", "without_init"])
def test_activate_beside_a_real_transformer_engine_is_refused(tmp_path: Path, namespace: bool) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    if not namespace:
        (package / "__init__.py").touch()
    said = activate_in_a_process(tmp_path)
    if namespace:  # a stray directory is nobody's installation
        assert said.startswith("plain: ")
    else:
        assert said.startswith("refused: transformer_engine is installed")
        assert "\n" not in said
