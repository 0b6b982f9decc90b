"""The step: in one rank, from override strings through verl's engine to one actor update or one ref log-prob pass.

`run` is the function that the rank server calls. It uses verl's own configuration, registry, engine and loss, and returns
what parity compares and what the probes saw. Flow: verl 0.9.1, `verl/workers/engine_workers.py` and
`verl/trainer/ppo/ray_trainer.py`.
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance import config as verl_config
from conformance import models
from conformance.config import Precision, Role
from conformance.errors import ConformanceError
from conformance.probes import Facts

if TYPE_CHECKING:
    import torch

    from conformance.ranks import Raised, RankContext


@dataclass(frozen=True)
class StepSpec:
    """One case: what every rank of it does. Equal specs give equal results, so a run may be shared."""

    role: Role
    model: str
    world_size: int
    overrides: tuple[str, ...]
    precision: Precision = "float32"
    #: Fact names that must be watched for, since they cost something or name a target: calls.*, config.*, reads.*, patched.*
    watch: tuple[str, ...] = ()
    checkpoint: str = ""


@dataclass(frozen=True)
class StepResult:
    """What one rank returns. Tensors are detached, on the CPU, of the precision they were computed in.

    log_probs, entropy: (sequences of this data-parallel rank, RESPONSE), on the ranks that hold the outputs, else None.
    loss: this data-parallel rank's loss, summed over micro-batches. grad_norm: global, before clipping.
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
    #: Names that a key under override_transformer_config could have meant: config fields and MindSpeed's arguments.
    options: tuple[str, ...] = ()
    readers: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def run(spec: StepSpec, context: RankContext) -> StepResult:
    """Run the case in this rank. Whatever the stack raises goes through untouched: it is the result."""
    from verl.utils.distributed import initialize_global_process_group_ray

    clock = _Clock()
    os.environ["DIST_INIT_METHOD"] = context.rendezvous
    initialize_global_process_group_ray(timeout_second=600)
    clock.lap("process_group")

    fixture = models.load(spec.model)
    batch = models.make_batch(fixture)
    overrides = verl_config.base_overrides(spec.checkpoint, spec.world_size, len(models.LENGTHS))
    composed = verl_config.compose([*overrides, *fixture.overrides, *spec.overrides])
    configs = verl_config.engine_configs(composed, spec.role)
    if spec.precision == "float32":
        # verl's dataclass allows bfloat16 and float16 only. float32 is the precision that finds faults, so it is set
        # after validation; every report says so.
        object.__setattr__(configs.engine, "dtype", "float32")
    clock.lap("config")

    watched = _Watched(spec.watch)
    watched.attach_reads()
    from conformance.probes import structure
    from conformance.probes.calls import CallCounter
    from conformance.probes.trace import DispatchTrace

    engine = build_engine(configs)
    engine.initialize()
    clock.lap("engine")

    trace, calls = DispatchTrace(), CallCounter(watched.of("calls"))
    data = shard(to_tensordict(batch, composed, spec.role), engine)
    with trace, calls:
        output = train(engine, data, configs) if spec.role == "actor" else infer(engine, data)
    clock.lap("step")

    facts: Facts = {
        "engine.class": structure.full_name(type(engine)),
        **structure.group_facts(),
        **structure.module_facts(engine.module),
        **trace.facts(structure.group_labels()),
        **calls.facts(),
        **structure.config_facts(engine.tf_config, watched.of("config")),
        **structure.patched_facts(watched.of("patched")),
        **watched.reads.facts(),
    }
    if spec.role == "actor":
        facts.update(structure.optimizer_facts(engine.optimizer))
    weights, export_fault = export_weights(engine) if spec.role == "actor" else (None, None)
    clock.lap("export")
    return StepResult(
        rank=context.rank,
        data_parallel_rank=int(engine.get_data_parallel_rank()),
        weights=weights,
        facts=facts,
        export_fault=export_fault,
        readers=watched.reads.readers(),
        options=watched.options(),
        seconds=clock.laps,
        **output_of(engine, output, data, spec.role),
    )


def build_engine(configs: verl_config.EngineConfigs) -> Any:
    """verl's registered engine for this device, or our own error when verl would not use its NPU engine."""
    from verl.utils.device import get_device_name
    from verl.workers.engine import EngineRegistry

    if get_device_name() != "npu":
        raise ConformanceError(f"verl sees device {get_device_name()!r}, not 'npu'")
    return EngineRegistry.new(
        model_type="language_model",
        backend=configs.engine.strategy,
        model_config=configs.model,
        engine_config=configs.engine,
        optimizer_config=configs.optimizer,
        checkpoint_config=configs.checkpoint,
    )


def to_tensordict(batch: models.Batch, composed: Any, role: Role) -> Any:
    """The batch as verl's trainer hands it to a worker: packed, with the role's fields and settings."""
    from verl import DataProto
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    fields = dataclasses.asdict(batch)
    fields["prompts"] = batch.input_ids[:, : models.PROMPT]
    fields["responses"] = batch.input_ids[:, models.PROMPT :]
    if role == "ref":
        for name in ("advantages", "old_log_probs", "ref_log_prob"):
            del fields[name]
    meta = {"temperature": 1.0, "global_token_num": batch.attention_mask.sum(-1).tolist()}
    data = left_right_2_no_padding(DataProto.from_single_dict(fields, meta_info=meta).to_tensordict())
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=verl_config.MICRO_BATCH,
        global_batch_size=len(models.LENGTHS),
        use_remove_padding=bool(composed.actor_rollout_ref.model.use_remove_padding),
        use_fused_kernels=False,
        calculate_entropy=True,
    )
    return data


def shard(data: Any, engine: Any) -> Any:
    """This data-parallel rank's slice, in order; the model-parallel peers hold identical data."""
    from verl.utils import tensordict_utils as tu

    size = int(engine.get_data_parallel_size())
    return tu.chunk_tensordict(data, size)[int(engine.get_data_parallel_rank())] if size > 1 else data


def train(engine: Any, data: Any, configs: verl_config.EngineConfigs) -> dict[str, Any]:
    from verl.workers.utils.losses import ppo_loss

    with engine.train_mode():
        output = engine.train_batch(data, loss_function=partial(ppo_loss, config=configs.role_config))
        engine.lr_scheduler_step()
    return dict(output)


def infer(engine: Any, data: Any) -> dict[str, Any]:
    with engine.eval_mode():
        return dict(engine.infer_batch(data, loss_function=None))


def output_of(engine: Any, output: dict[str, Any], data: Any, role: Role) -> dict[str, Any]:
    """The parts of verl's output that parity compares, on the ranks that hold them."""
    from verl.workers.utils.padding import no_padding_2_padding

    if not engine.is_mp_src_rank_with_outputs():
        return {"log_probs": None, "entropy": None, "loss": None, "grad_norm": None}
    padded = {name: no_padding_2_padding(output["model_output"][name], data).detach().cpu() for name in ("log_probs", "entropy")}
    actor = role == "actor"
    return {
        **padded,
        "loss": float(sum(output["loss"])) if actor else None,
        "grad_norm": float(output["metrics"]["grad_norm"]) if actor else None,
    }


def export_weights(engine: Any) -> tuple[dict[str, torch.Tensor] | None, Raised | None]:
    """All weights in Hugging Face form by verl's own export, or what it raised. Every rank takes part and keeps its copy."""
    from conformance.ranks.capture import capture

    try:
        tensors, _adapter = engine.get_per_tensor_param()
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors}, None
    except Exception as error:  # a failing export must not hide what the step showed
        return None, capture(error)


class _Watched:
    """The watched facts by family, and the read trace over what they name."""

    def __init__(self, watch: tuple[str, ...]) -> None:
        from conformance.probes.reads import ReadTrace

        self._watch = watch
        self.reads = ReadTrace(self.of("reads"))

    def of(self, family: str) -> list[str]:
        prefix = family + "."
        return [fact.removeprefix(prefix) for fact in self._watch if fact.startswith(prefix)]

    def options(self) -> tuple[str, ...]:
        """Fields of the transformer configs and arguments of MindSpeed, without the watched keys themselves."""
        import sys

        from megatron.core.transformer import MLATransformerConfig

        names = {field.name for field in dataclasses.fields(MLATransformerConfig)}
        if "mindspeed.megatron_adaptor" in sys.modules:
            from mindspeed.args_utils import get_full_args

            names |= set(vars(get_full_args()))
        return tuple(sorted(names - self.reads.keys)) if self.reads.keys else ()

    def attach_reads(self) -> None:
        """Observe the transformer config class and, where MindSpeed is there, its argument store."""
        import sys

        if not self.reads.keys:
            return
        from megatron.core.transformer import TransformerConfig

        self.reads.attach_class(TransformerConfig)
        if "mindspeed.megatron_adaptor" in sys.modules:
            from mindspeed.args_utils import get_full_args

            self.reads.attach_instance(get_full_args())


class _Clock:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
