"""What differs between verl's release lines: one module per line, each with a `RELEASE`, behind the interface below.

Rows and checks know nothing of it. A *route* is a way through verl to one step: `engine` is the engine that EngineRegistry gives
for the device; `worker` is the Megatron worker of releases up to 0.7, which is what their users run. The first of a
release's routes is its users'.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from packaging.version import InvalidVersion, Version

from conformance.matrix import Role
from conformance.results import Precision, Route
from conformance.stackfile import installed_version

if TYPE_CHECKING:
    import torch

    from conformance.models import Batch
    from conformance.ranks import RankContext


@dataclass(frozen=True)
class EngineConfigs:
    """verl's dataclasses for one role, as its worker hands them to the engine."""

    model: Any
    engine: Any
    optimizer: Any
    checkpoint: Any
    role_config: Any


@dataclass(frozen=True)
class Outputs:
    """What one rank holds after the pass; None on ranks that hold nothing.

    log_probs, entropy: (sequences of this data-parallel rank, RESPONSE), nats; entropy also None where the route gives none.
    loss: this data-parallel rank's. grad_norm: global, before clipping.
    """

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    loss: float | None = None
    grad_norm: float | None = None


class Driver(Protocol):
    """One role of verl, its model built in this rank. The attributes are verl's own objects, for probes to look at."""

    engine: Any

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """The model's chunks in this rank."""

    @property
    def tf_config(self) -> Any:
        """megatron-core's TransformerConfig, resolved."""

    @property
    def optimizer(self) -> Any:
        """megatron-core's optimizer; an AttributeError for ref."""

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among the data-parallel ranks."""

    def run(self) -> None:
        """The step: one actor update or one ref log-prob pass."""

    def outputs(self) -> Outputs:
        """What the step computed."""

    def export(self) -> dict[str, torch.Tensor]:
        """All weights under Hugging Face's names, by verl's own export; every rank takes part."""


@dataclass(frozen=True)
class Opening:
    """What a route needs to build its driver."""

    role: Role
    precision: Precision
    batch: Batch
    composed: Any
    context: RankContext


class Truth(Protocol):
    """The route's own way from a Hugging Face model to log-probs, entropy (None where it gives none), loss, and gradients."""

    def __call__(
        self, model: Any, role: Role, batch: Batch, composed: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, float | None, Any]:
        """The last is the role's optimizer configuration; the loss is None, and there are no gradients, for ref."""


@dataclass(frozen=True)
class Way:
    """One route: how a rank goes it, and what is true of it."""

    open: Callable[[Opening], Driver]
    truth: Truth


@dataclass(frozen=True)
class Release:
    """A release line of verl."""

    #: Name of the primary configuration, and what chooses the Megatron engine in it.
    config_name: str
    group: tuple[str, ...]
    routes: Mapping[Route, Way]
    engine_configs: Callable[[Any, Role], EngineConfigs]
    #: Overrides without which no case of the route runs, given whether MindSpeed is there.
    needs: Callable[[Route, bool], tuple[str, ...]]
    #: Modules to import before the first fork.
    warm: tuple[str, ...]
    #: Called in the warm server after the imports: the deviations that the stack's file declares.
    prepare: Callable[[], None]

    @property
    def default_route(self) -> Route:
        return next(iter(self.routes))


@cache
def current() -> Release:
    """The release line of the installed verl, by its metadata."""
    try:
        old = Version(installed_version("verl") or "0.9") < Version("0.8")
    except InvalidVersion:
        old = False
    release: Release = importlib.import_module(f"conformance.releases.{'verl07' if old else 'verl09'}").RELEASE
    return release
