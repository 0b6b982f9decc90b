"""accepted: is a key taken by the installed verl, under which role, and how must it be written?

Everything goes through verl's own Hydra configuration, dataclasses and validation. A form works when the composition and the
validation pass and the value then stands in the role's engine dataclass: a key that composes and lands nowhere is not
accepted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance import config as verl_config
from conformance import models
from conformance.matrix import Form, Role, Scalar, override_text
from conformance.ranks import Raised
from conformance.results import Route

if TYPE_CHECKING:
    from conformance.ranks import RankContext

FORMS: tuple[Form, ...] = ("plain", "+", "++")
OVERRIDES = "override_transformer_config"


@dataclass(frozen=True)
class Question:
    """What to try under one role: the keys with their values, and what goes with them in every form."""

    role: Role
    settings: tuple[tuple[str, Scalar], ...]
    #: Overrides that are the same in every form: the row's topology and companions.
    given: tuple[str, ...]
    #: The documented overrides of the other role when this one only inherits, e.g. the actor's, tried as they are.
    inherited: tuple[tuple[str, Scalar], ...] = ()


@dataclass(frozen=True)
class AcceptSpec:
    world_size: int
    checkpoint: str
    questions: tuple[Question, ...]
    route: Route = "engine"


@dataclass(frozen=True)
class FormResult:
    """One form of writing: `raised` is what it raises, `lost` the inherited keys that it drops, `missing` what lands nowhere."""

    form: str
    overrides: tuple[str, ...]
    raised: Raised | None
    lost: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def works(self) -> bool:
        return self.raised is None and not self.missing


def run(spec: AcceptSpec, context: RankContext) -> dict[Role, list[FormResult]]:
    """Answer this rank's question; the plain form first."""
    question = spec.questions[context.rank]
    return {question.role: _answer(spec, question)}


def _answer(spec: AcceptSpec, question: Question) -> list[FormResult]:
    base = [*verl_config.base_overrides(spec.checkpoint, spec.world_size, len(models.LENGTHS), spec.route), *question.given]
    attempts = [(str(form), [override_text(k, v, form) for k, v in question.settings]) for form in FORMS]
    if question.inherited:
        attempts.append(("inherited", [override_text(k, v, "++") for k, v in question.inherited]))
    return [_try(name, overrides, base, question) for name, overrides in attempts]


def _try(name: str, overrides: list[str], base: list[str], question: Question) -> FormResult:
    from conformance.ranks.capture import capture

    try:
        composed = verl_config.compose([*base, *overrides])
        engine = verl_config.engine_configs(composed, question.role).engine
    except Exception as error:
        return FormResult(name, tuple(overrides), capture(error))
    # ref inherits the actor's mapping: what the actor has and ref has not was dropped by writing under ref.
    lost = tuple(sorted(set(_transformer_overrides(composed, "actor")) - set(_transformer_overrides(composed, question.role))))
    missing = tuple(key for key, value in question.settings if not _landed(engine, key, value))
    return FormResult(name, tuple(overrides), None, lost, missing)


def _transformer_overrides(composed: Any, role: Role) -> dict[str, Any]:
    from omegaconf import OmegaConf

    engine = OmegaConf.select(composed, f"actor_rollout_ref.{role}.megatron")
    return dict(OmegaConf.to_container(engine[OVERRIDES], resolve=True))


def _landed(engine: Any, key: str, value: Scalar) -> bool:
    """Whether the role's engine dataclass now holds the value under this key's last name."""
    parent, _, leaf = key.rpartition(".")
    found = engine.override_transformer_config.get(leaf, _NOTHING) if parent.endswith(OVERRIDES) else getattr(engine, leaf)
    return bool(found == value)


_NOTHING = object()
