"""Stands for torchvision.transforms.functional."""

from enum import Enum
from typing import Any

from torchvision import missing


class InterpolationMode(Enum):
    """The resampling filters by name, as transformers names them in signatures and tables."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(*_args: Any, **_kwargs: Any) -> None:
    missing("transforms.functional.pil_to_tensor")


def to_pil_image(*_args: Any, **_kwargs: Any) -> None:
    missing("transforms.functional.to_pil_image")
