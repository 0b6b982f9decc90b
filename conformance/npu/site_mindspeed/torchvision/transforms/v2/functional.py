"""Stands for torchvision.transforms.v2.functional."""

from torchvision.transforms.functional import InterpolationMode, pil_to_tensor, to_pil_image

__all__ = ["InterpolationMode", "pil_to_tensor", "to_pil_image"]
