"""torch.npu.random: stands for the NPU's generators. There is one random number generator, the CPU's."""
# ruff: noqa: ARG001 - the signatures are the real ones

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._strict import refuse_unknown

__getattr__ = refuse_unknown("torch_npu.npu.random")

__all__ = [
    "get_rng_state", "get_rng_state_all", "initial_seed", "manual_seed", "manual_seed_all", "seed", "seed_all",
    "set_rng_state", "set_rng_state_all",
]  # fmt: skip

#: One per device; Megatron indexes it with the current device.
default_generators: tuple[torch.Generator, ...] = (torch.default_generator,) * 64


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    """uint8, as torch.get_rng_state."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    """As torch.set_rng_state."""
    torch.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """One element: all devices share the generator."""
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """The last state wins, since all devices share the generator."""
    for state in new_states:
        set_rng_state(state)


def manual_seed(seed: int) -> None:
    """Seeds the shared generator."""
    torch.default_generator.manual_seed(int(seed))


manual_seed_all = manual_seed


def seed() -> None:
    """Seeds the shared generator with a random number."""
    torch.default_generator.seed()


seed_all = seed


def initial_seed() -> int:
    """Of the shared generator."""
    return torch.default_generator.initial_seed()
