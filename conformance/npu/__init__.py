from __future__ import annotations
import os, sys
from dataclasses import dataclass
from typing import Literal

Mode = Literal["auto", "emulated", "real"]


@dataclass(frozen=True)
class Device:
    name: str
    torch_npu_version: str
    path: str


def activate(mode: Mode, *, mindspeed: bool) -> Device:
    os.environ["VERL_PLATFORM"] = "huawei"
    if not mindspeed:
        os.environ["NOTRITON"] = "1"
    sys.path.insert(0, "/tmp/spike/emu")
    import torch_npu

    return Device("emulated", "2.10.0", "x")


def install_kernels():
    pass
