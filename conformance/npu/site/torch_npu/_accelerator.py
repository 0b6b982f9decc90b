"""Tells torch that its accelerator is the NPU. Stands for the hooks and the device guard of torch_npu's C++ extension.

Without them `torch._C._get_accelerator()`, which `torch.distributed.barrier` calls, raises.
"""

from __future__ import annotations

from typing import Any

import torch


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, dev_id: int) -> bool:  # noqa: ARG002
        return True


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def install() -> None:
    """Called once, after the device module `torch.npu` is registered."""
    torch._C._acc.register_python_privateuseone_hook(_Hooks())
    torch._C._acc.register_python_privateuseone_device_guard(_Guard())
