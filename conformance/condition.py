"""A condition on a fact, as a row's evidence states it: how it is written, and when it holds."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conformance.yamlsource import form_error

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Condition:
    """A comparison with a fixed right side, e.g. `> 0` or `== TEGroupedMLP`."""

    operator: str
    right: float | str

    @classmethod
    def parse(cls, text: object) -> Condition:
        """Read `OPERATOR VALUE`; the value is a number, else text, which only == and != can compare."""
        right_form = "an operator (== != > >= < <=) and a value, such as '> 0' or '== 2'"
        match = re.fullmatch(r"\s*(==|!=|>=|<=|>|<)\s*(\S+)\s*", text) if isinstance(text, str) else None
        if match is None:
            raise form_error(f"{text!r} is not a condition", right_form)
        symbol, word = match.groups()
        value = _number(word)
        if isinstance(value, str) and symbol not in ("==", "!="):
            raise form_error(f"{text!r} orders text", "a number after > >= < <=")
        return cls(symbol, value)

    def holds(self, value: float | str | None) -> bool:
        """Whether a fact satisfies the condition. An absent fact (None) is 0 to a number and unequal to any text."""
        return compare(self.operator, value, self.right)

    def __str__(self) -> str:
        return f"{self.operator} {shown(self.right)}"


def compare(symbol: str, left: float | str | None, right: float | str | None) -> bool:
    """Whether the comparison holds. What is not there (None) is 0 to a number and unequal to any text."""
    if isinstance(left, str) or isinstance(right, str):
        if isinstance(left, str) and isinstance(right, str):
            return symbol in ("==", "!=") and COMPARE[symbol](left, right)
        return symbol == "!="
    return COMPARE[symbol](left or 0, right or 0)


def _number(word: str) -> float | str:
    for kind in (int, float):
        try:
            value = kind(word)
        except ValueError:
            continue
        return value if math.isfinite(value) else word
    return word


def shown(value: float | str | None) -> str:
    """A fact as text; None for one that is not there."""
    return "absent" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
