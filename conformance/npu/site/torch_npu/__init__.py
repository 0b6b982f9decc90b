"""An emulated torch_npu: a CPU-only machine runs NPU programs, and every operator is computed by torch on the CPU.

Stands for https://gitcode.com/ascend/pytorch. It has what verl, megatron-core and MindSpeed use; anything else raises and is
named. Importing it changes torch in this process for good, as importing the real one does.
"""

from __future__ import annotations

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from ._strict import refuse_unknown
from .version import __version__ as __version__

rename_privateuse1_backend("npu")

from . import _C, _accelerator, _device, _distributed, contrib, npu, ops, profiler, utils  # noqa: E402, F401

torch._register_device_module("npu", npu)  # type: ignore[no-untyped-call]
_accelerator.install()
_device.install()
_distributed.install()

unsupported_dtype = [torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]

globals().update(ops.EXPORTS)
__getattr__ = refuse_unknown("torch_npu")
