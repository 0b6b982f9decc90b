"""Loading the emulated operators without redirecting any device, and the comparisons that their tests share."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.stack

OPS = Path(__file__).parents[1] / "conformance" / "npu" / "site" / "torch_npu" / "ops"


def load_ops() -> ModuleType:
    """The operator package under a name of its own, so that no part of torch_npu is imported."""
    name = "emulated_ops"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, OPS / "__init__.py", submodule_search_locations=[str(OPS)])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


ops = load_ops()


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the `npu::` operators that the dispatcher saw."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            self.names.append(func._schema.name.removeprefix("npu::"))
        return func(*args, **(kwargs or {}))


def close(got: Tensor | Sequence[Tensor], want: Tensor | Sequence[Tensor], tolerance: float) -> None:
    """Shapes equal, and difference at most `tolerance` of the expected tensor's largest entry."""
    pairs = zip(*([t] if isinstance(t, Tensor) else t for t in (got, want)), strict=True)
    for g, w in pairs:
        assert g.shape == w.shape, (g.shape, w.shape)
        bound = tolerance * max(float(w.abs().max()) if w.numel() else 0.0, 1e-12)
        error = float((g.double() - w.double()).abs().max()) if w.numel() else 0.0
        assert error <= bound, f"off by {error:.3g}, allowed {bound:.3g}"


# float64 kernels against float64 formulas; float32 and bfloat16 against float64 formulas of the same inputs.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 5e-6, torch.bfloat16: 1.2e-2}


def run(function: Callable[..., Any], inputs: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """Output (the first, if several) and the gradients of `inputs` for a random output gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out = out if isinstance(out, Tensor) else out[0]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    grads = torch.autograd.grad(out, leaves, weight.to(out.dtype))
    return [out.detach(), *grads]


def agree(got: Callable[..., Any], want: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """`got` on the inputs as they are, `want` on float64 copies: outputs and all gradients agree."""
    close(run(got, inputs), run(want, [x.double() for x in inputs]), TOLERANCE[inputs[0].dtype])


def randn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def test_close_catches_what_is_just_above_its_bound() -> None:
    want = randn(3, 4)
    step = TOLERANCE[torch.float64] * float(want.abs().max())
    close(want + 0.9 * step, want, TOLERANCE[torch.float64])
    with pytest.raises(AssertionError, match="off by"):
        close(want + 1.1 * step, want, TOLERANCE[torch.float64])
    with pytest.raises(AssertionError):
        close(want[None], want, 1.0)


def test_schemas_are_registered_as_the_vendor_declares_them() -> None:
    for schema in ops.schemas.SCHEMAS:
        declared = torch._C.parse_schema("npu::" + schema)
        packet = getattr(torch.ops.npu, declared.name.removeprefix("npu::"))
        assert str(getattr(packet, declared.overload_name or "default")._schema) == str(declared)


def test_exports_name_every_operator_once() -> None:
    assert set(ops.EXPORTS) == {s.split("(")[0].split(".")[0] for s in ops.schemas.SCHEMAS}
    assert ops.EXPORTS["npu_swiglu"] is torch.ops.npu.npu_swiglu


def test_dispatcher_refuses_an_argument_that_the_schema_lacks() -> None:
    with pytest.raises(RuntimeError, match="eps"):
        torch.ops.npu.npu_rms_norm(randn(2, 4), randn(4), eps=1e-6)
