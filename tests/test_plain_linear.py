"""The plain backend's norms and linear layers against torch's own, on one rank; each comparison must fail on a planted fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_oracle import assert_same, draw, plain_package
from torch import Tensor

pytestmark = pytest.mark.stack

#: Large beside a mean square of about 0.01, so that an epsilon that is lost or misplaced shows.
EPS = 1e-3


@pytest.fixture(scope="module")
def te() -> Iterator[ModuleType]:
    with plain_package() as package:
        yield package


# --- norms


def norm_inputs() -> list[Tensor]:
    """x (3, 2, 16) with a mean that is not zero, a weight and a bias (16,)."""
    return [draw(3, 2, 16, seed=1) * 0.1 + 0.05, draw(16, seed=2), draw(16, seed=3)]


def check_rms_norm(rms_norm: Callable[..., Tensor], zero_centred: bool) -> None:
    ours = lambda x, w: rms_norm(x, w, EPS, zero_centred)  # noqa: E731
    theirs = lambda x, w: F.rms_norm(x, (16,), w + 1 if zero_centred else w, EPS)  # noqa: E731
    assert_same(ours, theirs, norm_inputs()[:2])


def check_layer_norm(layer_norm: Callable[..., Tensor], zero_centred: bool) -> None:
    ours = lambda x, w, b: layer_norm(x, w, b, EPS, zero_centred)  # noqa: E731
    theirs = lambda x, w, b: F.layer_norm(x, (16,), w + 1 if zero_centred else w, b, EPS)  # noqa: E731
    assert_same(ours, theirs, norm_inputs())


CHECKS = {"rms_norm": check_rms_norm, "layer_norm": check_layer_norm}


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("name", CHECKS)
def test_norm(te: ModuleType, name: str, zero_centred: bool) -> None:
    CHECKS[name](getattr(te.norm, name), zero_centred)


def _wrong_epsilon(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *params_eps_zero: norm(x, *params_eps_zero[:-2], 1.01e-3, params_eps_zero[-1])


def _not_zero_centred(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, *params_eps_zero: norm(x, *params_eps_zero[:-1], False)


def _constant_statistics(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Right values, wrong gradients: the statistics count as constants."""

    def faulty(x: Tensor, *rest: Any) -> Tensor:
        y = norm(x.detach(), *rest)
        return y + (x - x.detach())

    return faulty


@pytest.mark.parametrize("fault", [_wrong_epsilon, _not_zero_centred, _constant_statistics])
@pytest.mark.parametrize("name", CHECKS)
def test_norm_fault_is_caught(te: ModuleType, name: str, fault: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError):
        CHECKS[name](fault(getattr(te.norm, name)), True)


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm_modules_start_as_the_identity_of_the_scale(te: ModuleType, kind: str) -> None:
    x = norm_inputs()[0]
    outputs = []
    for zero_centred in (False, True):
        layer = getattr(te, kind)(
            16, eps=EPS, params_dtype=torch.float64, zero_centered_gamma=zero_centred, sequence_parallel=True
        )
        assert all(p.sequence_parallel and p.dtype == torch.float64 for p in layer.parameters())
        outputs.append(layer(x))
    assert torch.equal(*outputs)
    torch.testing.assert_close(outputs[0], getattr(torch.nn, kind)(16, eps=EPS, dtype=torch.float64)(x))


def test_half_precision_norm_is_computed_in_float32(te: ModuleType) -> None:
    x, w, b = (t.to(torch.bfloat16) for t in norm_inputs())
    assert torch.equal(te.norm.rms_norm(x, w, EPS, False), te.norm.rms_norm(x.float(), w.float(), EPS, False).bfloat16())
    assert torch.equal(te.norm.layer_norm(x, w, b, EPS, False), F.layer_norm(x.float(), (16,), w.float(), b.float(), EPS).bfloat16())


# --- linear layers


def fill(layer: torch.nn.Module) -> list[Tensor]:
    """Draw all parameters; returns them in the order of named_parameters()."""
    params = list(layer.parameters())
    with torch.no_grad():
        for i, p in enumerate(params):
            p.copy_(draw(*p.shape, seed=20 + i))
    return params


def as_function(layer: torch.nn.Module, *args: Any) -> Callable[..., Any]:
    """The layer as a function of x and its parameters, in the order of named_parameters()."""
    names = [name for name, _ in layer.named_parameters()]
    return lambda x, *params: torch.func.functional_call(layer, dict(zip(names, params, strict=True)), (x, *args))


def init(weight: Tensor) -> None:
    torch.nn.init.normal_(weight, std=0.02)


def check_linear(te: ModuleType, bias: bool, return_bias: bool) -> None:
    layer = te.Linear(6, 5, bias=bias, return_bias=return_bias, params_dtype=torch.float64, init_method=init)
    params = fill(layer)
    run = as_function(layer)

    def ours(x: Tensor, *params: Tensor) -> Tensor:
        if not return_bias:
            out: Tensor = run(x, *params)
            return out
        out, returned = run(x, *params)
        assert returned is (params[1] if bias else None)
        return out if returned is None else out + returned

    assert_same(ours, F.linear, [draw(3, 2, 6, seed=1), *params])


@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(te: ModuleType, bias: bool, return_bias: bool) -> None:
    check_linear(te, bias, return_bias)


def test_returned_bias_is_not_added(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is a layer that adds the bias and returns it as well."""
    original = te.Linear.forward

    def faulty(self: Any, x: Tensor) -> Any:
        out, bias = original(self, x)
        return out + bias, bias

    monkeypatch.setattr(te.Linear, "forward", faulty)
    with pytest.raises(AssertionError):
        check_linear(te, bias=True, return_bias=True)


def check_norm_linear(te: ModuleType, normalization: str, zero_centred: bool) -> None:
    layer = te.LayerNormLinear(
        16, 5, eps=EPS, normalization=normalization, zero_centered_gamma=zero_centred, return_layernorm_output=True,
        params_dtype=torch.float64, init_method=init,
    )  # fmt: skip
    run = as_function(layer)

    def ours(x: Tensor, *params: Tensor) -> Tensor:
        return torch.cat(run(x, *params), -1)

    def theirs(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        scale = scale + 1 if zero_centred else scale
        normed = F.rms_norm(x, (16,), scale, EPS) if shift is None else F.layer_norm(x, (16,), scale, shift, EPS)
        return torch.cat([F.linear(normed, weight, bias), normed], -1)

    assert_same(ours, theirs, [norm_inputs()[0], *fill(layer)])


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norm_linear(te: ModuleType, normalization: str, zero_centred: bool) -> None:
    check_norm_linear(te, normalization, zero_centred)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norm_linear_with_wrong_epsilon_is_caught(te: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te.linear, name, _wrong_epsilon(getattr(te.norm, name)))
    with pytest.raises(AssertionError):
        check_norm_linear(te, "RMSNorm" if name == "rms_norm" else "LayerNorm", False)


SPLITS = {"some": [2, 0, 3, 1], "one": [0, 0, 6, 0], "none": [0, 0, 0, 0]}


def check_grouped(te: ModuleType, splits: list[int], bias: bool, return_bias: bool) -> None:
    layer = te.GroupedLinear(4, 6, 5, bias=bias, return_bias=return_bias, params_dtype=torch.float64, init_method=init)
    names = [name for name, _ in layer.named_parameters()]
    run = as_function(layer, splits)

    def ours(x: Tensor, *params: Tensor) -> Tensor:
        if not return_bias:
            out: Tensor = run(x, *params)
            return out
        out, biases = run(x, *params)
        return out if biases is None else out + torch.stack(biases).repeat_interleave(torch.tensor(splits), 0)

    def theirs(x: Tensor, *params: Tensor) -> Tensor:
        """Token by token."""
        expert = torch.arange(4).repeat_interleave(torch.tensor(splits))
        named = dict(zip(names, params, strict=True))
        weights = torch.stack([named[f"weight{i}"] for i in range(4)])
        y = torch.einsum("tof,tf->to", weights[expert], x)
        return y + torch.stack([named[f"bias{i}"] for i in range(4)])[expert] if bias else y

    assert_same(ours, theirs, [draw(sum(splits), 6, seed=1), *fill(layer)])


@pytest.mark.parametrize(("bias", "return_bias"), [(False, False), (True, False), (True, True), (False, True)])
@pytest.mark.parametrize("splits", SPLITS)
def test_grouped_linear(te: ModuleType, splits: str, bias: bool, return_bias: bool) -> None:
    check_grouped(te, SPLITS[splits], bias, return_bias)


def test_shuffled_experts_are_caught(te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    original = te.GroupedLinear.forward

    def faulty(self: Any, x: Tensor, m_splits: list[int]) -> Any:
        """The groups of tokens go to the experts in reverse order."""
        parts = torch.cat(torch.split(x, m_splits)[::-1])
        return torch.cat(torch.split(original(self, parts, m_splits[::-1]), m_splits[::-1])[::-1])

    monkeypatch.setattr(te.GroupedLinear, "forward", faulty)
    with pytest.raises(AssertionError):
        check_grouped(te, SPLITS["some"], False, False)


def test_parameters_carry_what_megatron_reads(te: ModuleType) -> None:
    """Also without any parallelism: the global grad norm counts parameters marked so."""
    for layer in (te.Linear(6, 4, init_method=init), te.GroupedLinear(2, 6, 4, init_method=init)):
        weights = [p for name, p in layer.named_parameters() if "weight" in name]
        assert all(w.tensor_model_parallel and w.partition_dim == 0 and w.partition_stride == 1 for w in weights)
    row = te.Linear(6, 4, parallel_mode="row", init_method=init)
    column = te.Linear(6, 4, parallel_mode="column", init_method=init)
    assert (row.weight.partition_dim, column.weight.partition_dim) == (1, 0)
    assert column.bias.tensor_model_parallel
    assert not hasattr(row.bias, "tensor_model_parallel")


def test_extra_state_survives_a_state_dict(te: ModuleType) -> None:
    layer = te.Linear(6, 4, init_method=init)
    state = layer.state_dict()
    assert not state["_extra_state"].numel()
    layer.load_state_dict(state)
    with pytest.raises(te.linear.PlainBackendError, match="FP8 metadata"):
        layer.load_state_dict(state | {"_extra_state": torch.ones(1, dtype=torch.uint8)})
