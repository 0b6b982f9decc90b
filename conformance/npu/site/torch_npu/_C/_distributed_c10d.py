"""torch_npu._C._distributed_c10d: the `hccl` backend. Stands for HCCL over the NPUs' links; carries everything over Gloo."""
# ruff: noqa: ARG002 - the signatures are the real ones

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo

from .. import _groups
from .._strict import refuse_unknown

__getattr__ = refuse_unknown("torch_npu._C._distributed_c10d")

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class _Options:
    """ProcessGroupHCCL.Options: kept, without effect.

    The fields are those of torch's Backend.Options and of the vendor's binding (torch_npu/csrc/distributed/Init.cpp, 2.x);
    AttributeError for any other. MindSpeed looks for `hccl_config` on the class, where a slot is, too.
    """

    __slots__ = (
        *("_timeout", "global_ranks_in_group", "group_name"),
        *("group_id", "hccl_config", "is_high_priority_stream", "op_timeout"),
    )
    backend = "hccl"

    def __init__(self) -> None:
        self.hccl_config: dict[str, Any] = {}
        self.is_high_priority_stream = False
        self.global_ranks_in_group: list[int] = []
        self.group_id = ""
        self.group_name = ""
        self.op_timeout = _DEFAULT_TIMEOUT
        self._timeout = _DEFAULT_TIMEOUT


class ProcessGroupHCCL(ProcessGroupGloo):
    """A Gloo group that has HCCL's names. MC2 operators find it again by the communicator's name."""

    Options = _Options  # type: ignore[assignment]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options._timeout)
        self._hccl_options = options
        self._name = ""

    def get_hccl_comm_name(self, rankid: int, init_comm: bool = True) -> str:
        """The communicator's name, which MC2 operators take as `hcom`. ValueError for a rank that is not this process's."""
        own = self._hccl_options.global_ranks_in_group[self.rank()] if self._hccl_options.global_ranks_in_group else self.rank()
        if rankid != own:
            raise ValueError(f"get_hccl_comm_name takes this process's global rank ({own}), got {rankid}")
        if not self._name:
            self._name = _groups.register(self, self._hccl_options.group_id)
        return self._name


def create(backend_options: Any, group_options: Any) -> ProcessGroupHCCL:
    """What torch calls to make a group of backend `hccl` (torch.distributed.Backend.register_backend, extended API)."""
    options = group_options if isinstance(group_options, _Options) else _Options()
    options._timeout = backend_options.timeout
    options.global_ranks_in_group = list(backend_options.global_ranks_in_group)
    options.group_id = backend_options.group_id
    group = ProcessGroupHCCL(backend_options.store, backend_options.group_rank, backend_options.group_size, options)
    _groups.keep(group)
    return group
