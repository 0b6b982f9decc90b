"""MindSpeed's own wrappers over the emulated operators and kernels, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.mindspeed]

ROOT = Path(__file__).parents[1]

START = """
import sys
from conformance.npu import activate, install_kernels
activate("emulated", mindspeed=True)
import torch, torch_npu
import mindspeed.megatron_adaptor
"""

GROUPED = """
from mindspeed.ops.gmm import npu_gmm, npu_gmm_v2
x, w = torch.randn(5, 4, requires_grad=True), torch.randn(2, 4, 3, requires_grad=True)
try:
    npu_gmm(x, w, bias=None, group_list=[2, 5], group_type=0)
    raise SystemExit("without the kernels this must fail")
except NotImplementedError as error:
    assert "Could not run 'mindspeed::npu_gmm" in str(error), error
install_kernels()
want = torch.cat((x[:2] @ w[0], x[2:] @ w[1]))
dy = torch.randn(5, 3)
expected = torch.autograd.grad(want, (x, w), dy)
for function, groups in ((npu_gmm, [2, 5]), (npu_gmm, torch.tensor([2, 5])), (npu_gmm_v2, torch.tensor([2, 3]))):
    out = function(x, w, bias=None, group_list=groups, group_type=0)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(torch.autograd.grad(out, (x, w), dy), expected)
wrong = npu_gmm(x, w, bias=None, group_list=[3, 5], group_type=0)
assert not torch.allclose(wrong, want), "a wrong group must show"
"""

PERMUTATION = """
from mindspeed.te.pytorch.permutation import MoePermuteMaskMap, MoeUnpermuteMaskMap
from megatron.core.transformer.moe.moe_utils import permute, unpermute
chosen = torch.rand(6, 4).topk(2).indices
routing = torch.zeros(6, 4, dtype=torch.bool).scatter(1, chosen, True)
tokens, probs = torch.randn(6, 3, requires_grad=True), torch.rand(6, 4, requires_grad=True)
for pad, rows in ((False, 12), (True, 8)):
    mine, p, at = MoePermuteMaskMap.apply(tokens, routing, probs, rows, pad)
    theirs, q, where = permute(tokens, routing, probs=probs, num_out_tokens=rows, drop_and_pad=pad)[:3]
    torch.testing.assert_close((mine, p), (theirs, q))
    mine = MoeUnpermuteMaskMap.apply(mine * 2, at, tokens.shape, probs, routing, pad)
    theirs = unpermute(theirs * 2, where, tokens.shape, probs=probs, routing_map=routing, drop_and_pad=pad)
    torch.testing.assert_close(mine, theirs)
    dy, dp = torch.randn(6, 3), torch.randn(rows)
    grads = [torch.autograd.grad((a, b), (tokens, probs), (dy, dp)) for a, b in ((mine, p), (theirs, q))]
    torch.testing.assert_close(*grads)
for pad, rows in ((False, 12), (True, 8)):
    mine, p, _ = MoePermuteMaskMap.apply(tokens, routing, None, rows, pad)
    assert p is None, p
    theirs = permute(tokens, routing, num_out_tokens=rows, drop_and_pad=pad)[0]
    dy = torch.randn(rows, 3)
    torch.testing.assert_close(*(torch.autograd.grad(a, tokens, dy) for a in (mine, theirs)))
torch_npu.ops.moe_routing_map.scatter_probs = lambda values, routing: values.new_zeros(routing.shape)
_, p, _ = MoePermuteMaskMap.apply(tokens, routing, probs, 12, False)
faulty = torch.autograd.grad(p.sum(), probs)[0]
assert not torch.allclose(faulty, routing.float()), "a dropped gradient must show"
"""


GROUPED_GEMM = """
import acl
from mindspeed.features_manager.moe.gmm import MoEGmmFeature
from mindspeed.patch_utils import MindSpeedPatchesManager
from argparse import Namespace
adaptor = "mindspeed.core.transformer.moe.moe_feature.adaptor"
hidden, sys.modules["acl"] = acl, None
try:
    MoEGmmFeature().register_patches(MindSpeedPatchesManager, Namespace(moe_grouped_gemm=True, use_ascend_mc2=False))
    raise SystemExit("without acl this must fail")
except ModuleNotFoundError as error:
    assert "acl" in str(error), error
for name in [n for n in sys.modules if n.startswith("mindspeed.core.transformer.moe.")]:
    del sys.modules[name]
sys.modules["acl"] = hidden
MoEGmmFeature().register_patches(MindSpeedPatchesManager, Namespace(moe_grouped_gemm=True, use_ascend_mc2=False))
assert "910B" in acl.get_soc_name() and "910B" in torch.npu.get_device_name()
try:
    acl.rt
    raise SystemExit("an unknown name must be refused")
except AttributeError as error:
    assert "'acl' has no attribute 'rt'" in str(error), error
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    home = os.environ.get("MINDSPEED_HOME", "")
    path = os.pathsep.join(p for p in (str(ROOT), home, os.environ.get("PYTHONPATH", "")) if p)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + body],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )


@pytest.mark.parametrize("body", [GROUPED, PERMUTATION, GROUPED_GEMM], ids=["grouped", "permutation", "grouped_gemm"])
def test_mindspeed_agrees_with_plain_torch(body: str) -> None:
    done = run(body)
    assert done.returncode == 0, done.stderr[-2000:]
