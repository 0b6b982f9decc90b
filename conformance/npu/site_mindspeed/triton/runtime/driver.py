"""triton.runtime.driver: says that the target is an NPU."""

from __future__ import annotations

from dataclasses import dataclass

from .._strict import refuse_unknown

__getattr__ = refuse_unknown("triton.runtime.driver")


@dataclass(frozen=True)
class _Target:
    backend: str = "npu"
    arch: str = "Ascend910B"


class _Driver:
    """triton.runtime.driver.active."""

    def get_current_target(self) -> _Target:
        """The emulated NPU."""
        return _Target()


active = _Driver()
