"""Markers of the project's own tests: what a machine lacks is skipped with one clear line."""

from __future__ import annotations

import importlib.util

import pytest

from conformance.errors import UsageFault
from conformance.stack import find_mindspeed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacks = {}
    if not _has_mindspeed():
        lacks["mindspeed"] = "no MindSpeed here: set MINDSPEED_HOME to a clone of Ascend/MindSpeed"
    if importlib.util.find_spec("verl") is None or importlib.util.find_spec("torch") is None:
        lacks["stack"] = "the stack is not installed: pip install -r stacks/verl091-mcore016.txt"
    for item in items:
        for marker, reason in lacks.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _has_mindspeed() -> bool:
    try:
        return find_mindspeed() is not None
    except UsageFault:
        return False
