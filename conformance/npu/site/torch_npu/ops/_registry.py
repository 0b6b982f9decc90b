"""How an operator is registered: vendor's schema, CPU kernel, autograd that calls the vendor's backward operator.

A trace taken with a TorchDispatchMode therefore reads as on hardware: one `npu::` operator forward, one backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .schemas import SCHEMAS

Arguments = dict[str, Any]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])

LIBRARY: Any = torch.library.Library("npu", "DEF")  # type: ignore[no-untyped-call]
for _schema in SCHEMAS:
    LIBRARY.define(_schema)


def kernel(name: str, key: str = "CPU") -> Callable[[Kernel], Kernel]:
    """Register the decorated function as `npu::<name>` under dispatch key `key`."""

    def register(function: Kernel) -> Kernel:
        LIBRARY.impl(name, function, key)
        return function

    return register


def overload(name: str) -> Any:
    """The operator `npu::<name>`; `name` may carry an overload ("npu_apply_adam_w.out")."""
    packet, _, suffix = name.partition(".")
    return getattr(getattr(torch.ops.npu, packet), suffix or "default")


@dataclass(frozen=True)
class Derivative:
    """Autograd formula of one operator.

    `inputs` are the tensor arguments that can take a gradient. `backward` gets every argument of the forward call by
    name, the forward's outputs, and the gradients of the outputs; it returns one gradient (or None) per input. Only
    the output at index 0 is differentiable unless `outputs` says otherwise.
    """

    name: str
    inputs: tuple[str, ...]
    backward: Callable[[Arguments, Sequence[Any], Sequence[Tensor]], Sequence[Tensor | None]]
    outputs: tuple[int, ...] = (0,)


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: Derivative, arguments: Arguments, *_inputs: Tensor | None) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            result = overload(rule.name)(**arguments)
        outputs = result if isinstance(result, tuple) else (result,)
        ctx.mark_non_differentiable(*(out for i, out in enumerate(outputs) if i not in rule.outputs and isinstance(out, Tensor)))
        ctx.rule = rule
        named = {**arguments, **{f"->{i}": out for i, out in enumerate(outputs)}}
        ctx.plain = {key: value for key, value in named.items() if not isinstance(value, Tensor)}
        tensors = {key: value for key, value in named.items() if isinstance(value, Tensor)}
        ctx.tensor_names = tuple(tensors)
        ctx.save_for_backward(*tensors.values())
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        named = {**ctx.plain, **dict(zip(ctx.tensor_names, ctx.saved_tensors, strict=True))}
        outputs = [named.pop(key) for key in sorted((k for k in named if k.startswith("->")), key=lambda k: int(k[2:]))]
        return None, None, *ctx.rule.backward(named, outputs, gradients)


apply: Any = _Call.apply


def differentiable(rule: Derivative) -> None:
    """Give `npu::<rule.name>` the autograd formula `rule`."""
    schema = overload(rule.name)._schema

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        arguments |= {a.name: value for a, value in zip(schema.arguments, args, strict=False)}
        arguments |= kwargs
        return apply(rule, arguments, *(arguments[name] for name in rule.inputs))

    LIBRARY.impl(rule.name, call, "Autograd")
