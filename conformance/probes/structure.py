"""What was built: parallel group sizes, module classes, layers, the optimizer, resolved configuration, patched functions."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from conformance.blame import short_path
from conformance.probes import Fact, Facts

#: Label in `matrix.yaml` -> (getter in megatron.core.parallel_state, its keyword arguments).
GROUPS: dict[str, tuple[str, dict[str, bool]]] = {
    "tp": ("get_tensor_model_parallel_group", {}),
    "pp": ("get_pipeline_model_parallel_group", {}),
    "cp": ("get_context_parallel_group", {}),
    "dp": ("get_data_parallel_group", {}),
    "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}),
    "ep": ("get_expert_model_parallel_group", {}),
    "etp": ("get_expert_tensor_parallel_group", {}),
    "etp_ep": ("get_expert_tensor_and_model_parallel_group", {}),
    "edp": ("get_expert_data_parallel_group", {}),
    "tp_cp": ("get_tensor_and_context_parallel_group", {}),
}


def group_labels() -> dict[str, str]:
    """Process-group name -> label; the first label wins where megatron-core reuses one group."""
    from megatron.core import parallel_state

    labels: dict[str, str] = {}
    for label, (getter, kwargs) in GROUPS.items():
        group = getattr(parallel_state, getter)(**kwargs)
        labels.setdefault(group.group_name, label)
    return labels


def group_facts() -> Facts:
    """`groups.<label>`: sizes in ranks."""
    from megatron.core import parallel_state

    return {f"groups.{label}": getattr(parallel_state, getter)(**kwargs).size() for label, (getter, kwargs) in GROUPS.items()}


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def module_facts(chunks: Iterable[torch.nn.Module]) -> Facts:
    """`modules.<class>`: modules of exactly that class; `layers.count` and `layers.first` (global, from 1) of this rank."""
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer

    facts: Facts = {}
    classes: Counter[str] = Counter()
    numbers: list[int] = []
    for chunk in chunks:
        for module in chunk.modules():
            classes[full_name(type(module))] += 1
            if isinstance(module, BaseTransformerLayer):
                numbers.append(int(getattr(module, "layer_number", 0)))
    facts.update({f"modules.{name}": count for name, count in classes.items()})
    facts["layers.count"] = len(numbers)
    facts["layers.first"] = min(numbers, default=0)
    return facts


def optimizer_facts(optimizer: Any) -> Facts:
    """`optimizer.class`, and elements and bytes that this rank keeps for Adam.

    `optimizer.shard_elements` counts exp_avg elements: a distributed optimizer keeps 1/dp of them. `storage.*` counts what
    the tensors' storages really hold, so that a state that was swapped out counts 0.
    """
    chained = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    elements = resident = 0
    for part in chained:
        inner = getattr(part, "optimizer", part)
        for state in getattr(inner, "state", {}).values():
            exp_avg = state.get("exp_avg") if isinstance(state, dict) else None
            if isinstance(exp_avg, torch.Tensor):
                elements += exp_avg.numel()
                resident += exp_avg.untyped_storage().size()
    return {
        "optimizer.class": full_name(type(chained[0])),
        "optimizer.shard_elements": elements,
        "storage.exp_avg_bytes": resident,
    }


def config_facts(config: Any, fields: Iterable[str]) -> Facts:
    """`config.<field>`: the resolved TransformerConfig value, numbers as they are, everything else as text."""
    return {f"config.{field}": _scalar(getattr(config, field, None)) for field in fields}


def patched_facts(targets: Iterable[str]) -> Facts:
    """`patched.<module>:<attribute path>`: what this consumer module now refers to, `<place>:<qualified name>`.

    The place of a class is its module; of a function the file of its code, since a wrapper may take on the names of what it
    wraps.
    """
    facts: Facts = {}
    for target in targets:
        module_name, _, path = target.partition(":")
        value: Any = importlib.import_module(module_name)
        for attribute in path.split("."):
            value = getattr(value, attribute)
        code = getattr(value, "__code__", None)
        place = short_path(code.co_filename) if code else getattr(value, "__module__", "unknown")
        name = code.co_qualname if code else getattr(value, "__qualname__", type(value).__qualname__)
        facts[f"patched.{target}"] = f"{place}:{name}"
    return facts


def _scalar(value: object) -> Fact:
    if isinstance(value, bool):
        return float(value)
    return value if isinstance(value, int | float) else str(value)
