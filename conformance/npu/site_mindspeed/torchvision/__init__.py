"""Stands for torchvision, which a user's stack has through vLLM; its wheel needs the CUDA build of torch.

MindSpeed's repatch asks every loaded module for names, which makes transformers import all its image processors, and they
import this. Nothing in a text model calls any of it: whatever is called raises.
"""

from typing import NoReturn


def missing(name: str) -> NoReturn:
    """What every function here does."""
    raise NotImplementedError(f"torchvision stand-in: {name} is not there; no text model needs it")


from torchvision import io, ops, transforms  # noqa: E402

__all__ = ["io", "missing", "ops", "transforms"]
