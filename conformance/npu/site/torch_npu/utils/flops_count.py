"""torch_npu.utils.flops_count: importable; counting raises."""

from __future__ import annotations

from .._strict import not_emulated


class FlopsCounter:
    """Stands for torch_npu's counter inside its operators."""

    def __init__(self) -> None:
        raise not_emulated("torch_npu.utils.flops_count.FlopsCounter")
