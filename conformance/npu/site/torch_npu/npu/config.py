"""torch_npu.npu.config and the compile switches: stand for settings of CANN's operator compiler, of which there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Config:
    """Writable as on hardware; nothing reads it here."""

    allow_internal_format: bool = False


config = _Config()


def set_compile_mode(jit_compile: bool = False) -> None:
    """Online compilation of operators: nothing is compiled."""


def set_option(option: dict[str, str]) -> None:
    """CANN options; TypeError unless a dict, as on hardware."""
    if not isinstance(option, dict):
        raise TypeError("npu option must be a dict")
