"""There is no FP8: it is off, says so when asked, and cannot be turned on."""

from __future__ import annotations

import contextlib
from typing import Any

from ..errors import PlainBackendError, only


class FP8GlobalStateManager:
    """The global FP8 state: always off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> Any:
        raise PlainBackendError("plain backend: FP8GlobalStateManager.get_fp8_recipe: there is no FP8")


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: object = None,
    fp8_group: object = None,
) -> contextlib.AbstractContextManager[None]:
    """A null context for `enabled=False`, in which the other arguments mean nothing but `calibrating`."""
    del fp8_recipe, fp8_group
    only("fp8_autocast", False, enabled=enabled, calibrating=calibrating)
    return contextlib.nullcontext()


def fp8_model_init(
    enabled: bool = True, recipe: object = None, preserve_high_precision_init_val: bool = False
) -> contextlib.AbstractContextManager[None]:
    """A null context for `enabled=False`."""
    del recipe, preserve_high_precision_init_val
    only("fp8_model_init", False, enabled=enabled)
    return contextlib.nullcontext()
