"""Stands for torchvision.ops.boxes."""

from typing import Any

from torchvision import missing


def batched_nms(*_args: Any, **_kwargs: Any) -> None:
    missing("ops.boxes.batched_nms")
