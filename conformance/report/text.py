"""Text of strangers on one line: nothing in it moves a terminal's cursor, turns the reading direction, or fills a screen."""

from __future__ import annotations

import unicodedata


def one_line(text: str, limit: int = 1000) -> str:
    """At most `limit` characters, without control, format (bidirectional, zero-width) or unassigned characters.

    Those and every run of white space become one space. A text that was cut ends in an ellipsis.
    """
    printable = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text[: limit + 1])
    shown = " ".join(printable.split())
    return shown[:limit] + "…" if len(text) > limit else shown
