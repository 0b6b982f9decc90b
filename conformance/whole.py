"""What makes a run whole: nothing left out on the command line, and a record of every check and every family of operators."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from conformance.matrix import ROLES, Row
from conformance.operators import Family
from conformance.results import PRECISIONS, ResultSet

#: Options of pytest that leave out tests.
_NARROWING = ("keyword", "markexpr", "deselect", "ignore", "ignore_glob", "lf", "stepwise")


def is_narrowed(config: pytest.Config) -> bool:
    """Whether some of the rows' tests were left out on the command line."""
    if any(getattr(config.option, name, None) for name in _NARROWING):
        return True
    texts = [str(argument) for argument in config.args]
    files = [(config.invocation_params.dir / text.partition("::")[0]).is_file() for text in texts]
    return any(files) or any("::" in text for text in texts)


def total_checks(rows: Collection[Row]) -> int:
    """Checks of these rows: accepted, engaged and parity in each precision, per role and spelling."""
    return sum(len(row.variant_names) for row in rows) * len(ROLES) * (2 + len(PRECISIONS))


def is_whole(results: ResultSet, rows: Collection[Row], families: Collection[Family]) -> bool:
    """Whether each has its record, whatever came out. A test that ends without one has failed us."""
    return len(results.checks) == total_checks(rows) and {r.family for r in results.operators} == set(families)
