"""FP8 recipes: names that megatron-core subclasses or tests against. None can be made, as there is no FP8 here."""

from __future__ import annotations

import enum

from ..errors import Unsupported


class Format(enum.Enum):
    """What an FP8 recipe is made with."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


class DelayedScaling(Unsupported):
    """Base of megatron-core's TEDelayedScaling."""


class Float8CurrentScaling(Unsupported):
    """Per-tensor scaling."""


class Float8BlockScaling(Unsupported):
    """Scaling by blocks."""


class MXFP8BlockScaling(Unsupported):
    """Scaling by blocks of 32."""
