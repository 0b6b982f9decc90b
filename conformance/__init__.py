"""Conformance suite for verl + MindSpeed."""

__version__ = "0.1.0"
