"""Every exception of the suite, and the exit code each one ends in."""

from __future__ import annotations


class ConformanceError(Exception):
    """Our own fault: shown as `error`, never as an upstream failure."""

    exit_code = 3


class UsageFault(ConformanceError):
    """Bad input or a wrong environment: one line that says what is wrong, where, and the right form."""

    exit_code = 2
