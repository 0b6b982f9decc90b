"""Stands for torchvision.io."""

from typing import Any

from torchvision import missing


class ImageReadMode:
    """Only named in signatures."""


def read_image(*_args: Any, **_kwargs: Any) -> None:
    missing("io.read_image")


def decode_image(*_args: Any, **_kwargs: Any) -> None:
    missing("io.decode_image")
