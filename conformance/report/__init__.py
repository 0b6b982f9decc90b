"""Renderings of a result set."""
