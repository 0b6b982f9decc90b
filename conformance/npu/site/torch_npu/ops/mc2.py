"""Matrix products fused with a collective (MC2).

They talk to the process group itself, not through torch.distributed's functions: on hardware the collective is inside
the operator, and a count of torch.distributed calls must not see it here either.

Extension of the emulation: hardware takes float16 and bfloat16 only, and for the two that training uses a contraction
from 256 and below 65535. Here float32 is taken too, and a shorter contraction: the suite's models are tiny, and float32 is
the precision that finds faults. `EXTRA_DTYPES` and `_contraction` are all there is of it.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from ._checks import only_defaults, refuse, require, wide
from ._registry import kernel

#: What hardware does not take and the emulation does; see the module's docstring.
EXTRA_DTYPES = (torch.float32,)
_DTYPES = (torch.float16, torch.bfloat16, *EXTRA_DTYPES)
_LONGEST = 65534  # of the contraction, in the two operators that training uses


def _group(hcom: str) -> Any:
    """The process group that `get_hccl_comm_name` named. Imported late: the operators work without it."""
    return importlib.import_module("torch_npu._groups").group_of(hcom)


def _contraction(op: str, left: Tensor) -> None:
    """Hardware wants 256 at least; the emulation takes less."""
    require(left.shape[-1] <= _LONGEST, op, f"the contraction must be below {_LONGEST + 1}, got {left.shape[-1]}.")


def _transposed(tensor: Tensor) -> bool:
    rows, columns = tensor.stride()[-2:]
    return not tensor.is_contiguous() and rows == 1 and columns == tensor.shape[-2]


def _operands(op: str, left: Tensor, right: Tensor, ranks: tuple[int, ...] = (2,)) -> None:
    """Before the collective: a rank that says no must not leave the others waiting in it."""
    require(left.dtype == right.dtype, op, f"operands must have one dtype, got {left.dtype} and {right.dtype}.")
    require(left.dtype in _DTYPES, op, f"operands must be float16 or bfloat16, got {left.dtype}.")
    dimensions = " or ".join(map(str, ranks))
    sentence = f"operands must have {dimensions} and 2 dimensions, got {left.dim()} and {right.dim()}."
    require(left.dim() in ranks and right.dim() == 2, op, sentence)
    require(left.shape[-1] == right.shape[0], op, f"{tuple(left.shape)} x {tuple(right.shape)} do not multiply.")
    require(not _transposed(left), op, f"the left operand must not be transposed, strides are {left.stride()}.")


def _matmul(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    product = wide(left) @ wide(right)
    return (product if bias is None else product + wide(bias)).to(left.dtype)


def _check(op: str, group: Any, world_size: int, comm_turn: int) -> None:
    require(group.size() == world_size, op, f"world_size is {world_size}, the group has {group.size()} ranks.")
    if comm_turn != 0:
        refuse(op, "comm_turn", comm_turn)


@kernel("npu_all_gather_base_mm")
def all_gather_base_mm(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    bias: Tensor | None = None,
    gather_index: int = 0,
    gather_output: bool = True,
    comm_turn: int = 0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """(gathered input @ x2, gathered input): (W*m, n) and (W*m, k), the latter empty unless `gather_output`."""
    op = "npu_all_gather_base_mm"
    only_defaults(op, bias=bias, **others)
    if gather_index != 0:
        refuse(op, "gather_index", gather_index)
    group = _group(hcom)
    _check(op, group, world_size, comm_turn)
    _operands(op, input, x2)
    _contraction(op, input)
    gathered = input.new_empty(input.shape[0] * world_size, *input.shape[1:])
    group._allgather_base(gathered, input.contiguous()).wait()
    product = _matmul(gathered, x2)
    return product, gathered if gather_output else input.new_empty(0)


@kernel("npu_mm_reduce_scatter_base")
def mm_reduce_scatter_base(
    input: Tensor,
    x2: Tensor,
    hcom: str,
    world_size: int,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    comm_turn: int = 0,
    **others: Any,
) -> Tensor:
    """This rank's rows of the sum over ranks of input @ x2: (m/W, n). Partial products have input's dtype."""
    op = "npu_mm_reduce_scatter_base"
    only_defaults(op, bias=bias, **others)
    if reduce_op != "sum":
        refuse(op, "reduce_op", reduce_op)
    group = _group(hcom)
    _check(op, group, world_size, comm_turn)
    _operands(op, input, x2)
    _contraction(op, input)
    require(input.shape[0] % world_size == 0, op, f"{input.shape[0]} rows do not split over {world_size} ranks.")
    partial = _matmul(input, x2)
    out = partial.new_empty(partial.shape[0] // world_size, partial.shape[1])
    group._reduce_scatter_base(out, partial.contiguous()).wait()
    return out


@kernel("npu_mm_all_reduce_base")
def mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
    comm_quant_mode: int = 0,
    **others: Any,
) -> Tensor:
    """Sum over ranks of (x1 @ x2 + bias): (m, n), or (b, s, n) for an x1 (b, s, k)."""
    op = "npu_mm_all_reduce_base"
    only_defaults(op, **others)
    for name, value in (("antiquant_group_size", antiquant_group_size), ("comm_quant_mode", comm_quant_mode)):
        if value != 0:
            refuse(op, name, value)
    if reduce_op != "sum":
        refuse(op, "reduce_op", reduce_op)
    group = _group(hcom)
    _check(op, group, group.size(), comm_turn)
    _operands(op, x1, x2, (2, 3))
    require(x1.numel() > 0 and x2.numel() > 0, op, f"operands must not be empty, got {tuple(x1.shape)}, {tuple(x2.shape)}.")
    columns = x2.shape[1]
    require(bias is None or bias.shape == (columns,), op, f"bias must have {columns} numbers, as the product has columns.")
    require(bias is None or bias.dtype == x1.dtype, op, f"bias must have the operands' dtype {x1.dtype}.")
    product = _matmul(x1, x2, bias).contiguous()
    group.allreduce([product]).wait()
    return product
