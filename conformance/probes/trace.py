"""What passed the dispatcher during the step: NPU operators and collectives.

One TorchDispatchMode sees both, on the emulated NPU and on a real one, forward and backward (autograd carries the mode into
its threads). Nothing here knows how the operators are implemented.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.probes import Facts

#: torch.distributed's dispatcher operators (namespace c10d) -> the word used in `matrix.yaml`.
COLLECTIVES: Mapping[str, str] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}


class DispatchTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of operators in namespace `npu`, and collectives by process-group name, while it is entered.

    `in_thread` is called with every operator, in the thread that calls the operator: other probes come into autograd's threads
    by it.
    """

    def __init__(self, in_thread: Callable[[], object] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._in_thread = in_thread
        self._lock = threading.Lock()
        self.ops: Counter[str] = Counter()
        self.collectives: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._in_thread()
        namespace, _, rest = func.name().partition("::")
        if namespace == "npu":
            with self._lock:
                self.ops[rest.partition(".")[0]] += 1
        elif namespace == "c10d":
            operation = COLLECTIVES.get(rest.partition(".")[0])
            if operation:
                self._count(operation, args)
        return func(*args, **(kwargs or {}))

    def _count(self, operation: str, args: Any) -> None:
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                try:
                    group = torch.distributed.ProcessGroup.unbox(arg)
                except (RuntimeError, TypeError):
                    continue  # the reduce operation travels as a ScriptObject as well
                if group.size() > 1:
                    with self._lock:
                        self.collectives[(group.group_name, operation)] += 1
                return

    def facts(self, labels: Mapping[str, str]) -> Facts:
        """`ops.*` and `collectives.*`; `labels` maps a process group's name to tp, pp, ...; groups without one are `other`.

        `any` counts every collective of a group.
        """
        facts: Facts = {f"ops.{name}": count for name, count in self.ops.items()}
        for (group, operation), count in self.collectives.items():
            for key in (operation, "any"):
                name = f"collectives.{labels.get(group, 'other')}.{key}"
                facts[name] = float(facts.get(name, 0)) + count
        return facts
