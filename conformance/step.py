"""The step: in one rank, from override strings through verl to one actor update or one ref log-prob pass.

`run` is the function that the rank server calls. It goes one of the routes of the installed release (`releases`), with verl's own
configuration, model building and loss, and returns what parity compares and what the probes saw.
"""

from __future__ import annotations

import dataclasses
import difflib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conformance import config as verl_config
from conformance import extensions, models, releases
from conformance.errors import ConformanceError
from conformance.matrix import Role
from conformance.probes import Facts
from conformance.releases import Driver, Opening
from conformance.results import Precision, Route

if TYPE_CHECKING:
    import torch

    from conformance.ranks import Raised, RankContext

#: How much alike two names are (difflib's ratio) for the one to be offered in place of the other.
ALIKE = 0.7


@dataclass(frozen=True)
class StepSpec:
    """One case: what every rank of it does. Equal specs give equal results, so a run may be shared."""

    role: Role
    model: str
    world_size: int
    overrides: tuple[str, ...]
    precision: Precision = "float32"
    #: Fact names that must be watched for, since they cost something or name a target: calls.*, config.*, reads.*, patched.*,
    #: and those of other packages' probes.
    watch: tuple[str, ...] = ()
    checkpoint: str = ""
    route: Route = "engine"


@dataclass(frozen=True)
class StepResult:
    """What one rank returns. Tensors are detached, on the CPU, of the precision they were computed in.

    log_probs, entropy: (sequences of this data-parallel rank, RESPONSE), on the ranks that hold the outputs, else None;
    entropy also where the route gives none. loss: this data-parallel rank's. grad_norm: global, before clipping.
    weights: after the update, Hugging Face names, as this rank exports them. export_fault: what verl's export of them raised; the
    step itself had ended well by then.
    """

    rank: int
    data_parallel_rank: int
    log_probs: torch.Tensor | None
    entropy: torch.Tensor | None
    loss: float | None
    grad_norm: float | None
    weights: dict[str, torch.Tensor] | None
    facts: Facts
    export_fault: Raised | None = None
    #: Watched key that nobody read -> names much like it that were read: config fields and MindSpeed's arguments.
    near: dict[str, list[str]] = field(default_factory=dict)
    #: By fact family, what went wrong in another package's probe: one line that names its entry point.
    probe_faults: dict[str, str] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def run(spec: StepSpec, context: RankContext) -> StepResult:
    """Run the case in this rank. Whatever the stack raises goes through untouched: it is the result."""
    clock = _Clock()
    fixture = models.load(spec.model)
    overrides = verl_config.base_overrides(spec.checkpoint, spec.world_size, len(models.LENGTHS), spec.route)
    composed = verl_config.compose([*overrides, *fixture.overrides, *spec.overrides])
    opening = Opening(spec.role, spec.precision, models.make_batch(fixture), composed, context)
    clock.lap("config")

    watched = _Watched(spec.watch)
    watched.attach_reads()
    from conformance.probes import structure
    from conformance.probes.calls import CallCounter
    from conformance.probes.trace import DispatchTrace

    _take_device(context)
    driver = releases.current().routes[spec.route].open(opening)
    clock.lap("engine")

    calls = CallCounter(watched.of("calls"))
    trace = DispatchTrace(calls.watch_thread)
    with trace, calls:
        driver.run()
    clock.lap("step")

    facts: Facts = {
        "engine.class": structure.full_name(type(driver.engine)),
        **structure.group_facts(),
        **structure.module_facts(driver.modules),
        **trace.facts(structure.group_labels()),
        **calls.facts(),
        **structure.config_facts(driver.tf_config, watched.of("config")),
        **structure.patched_facts(watched.of("patched")),
        **watched.reads.facts(),
    }
    if spec.role == "actor":
        facts.update(structure.optimizer_facts(driver.optimizer))
    own, probe_faults = extensions.probe(driver.engine, watched.own_families())
    facts.update(own)
    weights, export_fault = export_weights(driver) if spec.role == "actor" else (None, None)
    clock.lap("export")
    outputs = driver.outputs()
    return StepResult(
        rank=context.rank,
        data_parallel_rank=driver.data_parallel_rank,
        log_probs=outputs.log_probs,
        entropy=outputs.entropy,
        loss=outputs.loss,
        grad_norm=outputs.grad_norm,
        weights=weights,
        facts=facts,
        export_fault=export_fault,
        readers=watched.reads.readers(),
        near=watched.near(),
        probe_faults=probe_faults,
        seconds=clock.laps,
    )


def _take_device(context: RankContext) -> None:
    """Choose the device with this rank's number. verl leaves that to Ray, which shows a worker one device only.

    ConformanceError when there are fewer devices than ranks: that says nothing about the row.
    """
    from verl.utils.device import get_torch_device

    devices = get_torch_device()
    count = devices.device_count()
    if count < context.world_size:
        raise ConformanceError(f"the case needs {context.world_size} NPUs, and {count} can be seen here")
    devices.set_device(context.rank)


def export_weights(driver: Driver) -> tuple[dict[str, torch.Tensor] | None, Raised | None]:
    """All weights in Hugging Face form by verl's own export, or what it raised. Every rank takes part and keeps its copy."""
    from conformance.ranks.capture import capture

    try:
        return driver.export(), None
    except Exception as error:  # a failing export must not hide what the step showed
        return None, capture(error)


class _Watched:
    """The watched facts by family, and the read trace over what they name."""

    def __init__(self, watch: tuple[str, ...]) -> None:
        from conformance.probes.reads import ReadTrace

        self._watch = watch
        self.reads = ReadTrace(self.of("reads"))
        self._alike: dict[str, list[str]] = {}

    def of(self, family: str) -> list[str]:
        prefix = family + "."
        return [fact.removeprefix(prefix) for fact in self._watch if fact.startswith(prefix)]

    def own_families(self) -> set[str]:
        """The families among them that other packages' probes bring."""
        return {fact.partition(".")[0] for fact in self._watch} & set(extensions.entry_points(extensions.PROBES))

    def attach_reads(self) -> None:
        """Observe the transformer config class and, where MindSpeed is there, its argument store."""
        import sys

        if not self.reads.keys:
            return
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig

        names, stores = {field.name for field in dataclasses.fields(MLATransformerConfig)}, []
        if "mindspeed.megatron_adaptor" in sys.modules:
            from mindspeed.args_utils import get_full_args

            stores = [get_full_args()]
            names |= set(vars(stores[0]))
        self._alike = {key: difflib.get_close_matches(key, sorted(names - {key}), 3, ALIKE) for key in self.reads.keys}
        self.reads.keys |= {name for found in self._alike.values() for name in found}
        self.reads.attach_class(TransformerConfig)
        for store in stores:
            self.reads.attach_instance(store)

    def near(self) -> dict[str, list[str]]:
        """For each key that nobody read, the names like it that somebody did read."""
        facts = self.reads.facts()
        found = {key: [name for name in names if facts[f"reads.{name}"]] for key, names in self._alike.items()}
        return {key: names for key, names in found.items() if names and not facts[f"reads.{key}"]}


class _Clock:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
