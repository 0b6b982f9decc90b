"""Stands for torchvision.ops."""

from typing import Any

from torchvision import missing


def masks_to_boxes(*_args: Any, **_kwargs: Any) -> None:
    missing("ops.masks_to_boxes")
