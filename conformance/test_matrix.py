"""Every row of `matrix.yaml` as tests: `-k ROW` selects a row, for no name here contains another row's id by accident."""

from __future__ import annotations

import pytest

from conformance.matrix import ROLES, Role, Row
from conformance.plugin import conclude
from conformance.results import PRECISIONS, Precision
from conformance.runner import Runner
from conformance.session import SESSION

Spelt = tuple[Row, Role, str]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rows = metafunc.config.stash[SESSION].rows
    cases: list[object] = []
    for row in rows:
        for variant in row.variant_names:
            for role in ROLES:
                name = f"{row.id}-{role}" if variant == "documented" else f"{row.id}-{variant}-{role}"
                mark = pytest.mark.xdist_group(row.id)
                if "precision" in metafunc.fixturenames:
                    cases += [pytest.param((row, role, variant), p, id=f"{name}-{p}", marks=mark) for p in PRECISIONS]
                else:
                    cases.append(pytest.param((row, role, variant), id=name, marks=mark))
    metafunc.parametrize(("spelt", "precision") if "precision" in metafunc.fixturenames else "spelt", cases)


def test_key_is_taken(request: pytest.FixtureRequest, runner: Runner, spelt: Spelt) -> None:
    """accepted: through verl's own configuration, in which form, and what the others raise."""
    conclude(request, runner, spelt, "accepted")


def test_engaged(request: pytest.FixtureRequest, runner: Runner, spelt: Spelt) -> None:
    """engaged: on, explicitly off and absent, judged by what ran."""
    conclude(request, runner, spelt, "engaged")


def test_parity(request: pytest.FixtureRequest, runner: Runner, spelt: Spelt, precision: Precision) -> None:
    """parity: against one rank with everything off."""
    conclude(request, runner, spelt, "parity", precision)
