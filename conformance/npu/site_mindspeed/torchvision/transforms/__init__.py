"""Stands for torchvision.transforms."""

from torchvision.transforms import functional, v2
from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode", "functional", "v2"]
