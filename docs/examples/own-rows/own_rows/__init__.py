"""A model and a probe for the conformance suite, see `pyproject.toml` and `my-rows.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The model: eight experts. The form is that of the suite's own `fixtures/*.json`.
MOE8 = Path(__file__).with_name("moe8.json")


def dispatcher(engine: Any) -> Mapping[str, float | str]:
    """Class and number of the token dispatchers in verl's engine, and a rank's experts. Called in each rank, after the step."""
    layers = [module for part in engine.module for module in part.modules() if hasattr(module, "token_dispatcher")]
    classes = sorted({type(layer.token_dispatcher).__name__ for layer in layers})
    return {
        "class": "+".join(classes) or "none",
        "layers": len(layers),
        "local_experts": sum(layer.num_local_experts for layer in layers[:1]),
    }
