"""Names only: see `recipe`."""

from . import recipe

__all__ = ["recipe"]
