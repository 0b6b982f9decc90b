"""The short way to a composition against Hydra's own: the same configuration, and the same errors."""

from collections.abc import Callable
from typing import Any

import pytest

from conformance import config
from conformance.accepted import FORMS
from conformance.matrix import load_matrix, override_text

pytestmark = pytest.mark.stack

BASE = config.base_overrides("model", 2, 8)
ROWS = load_matrix().rows
#: All forms of all documented keys in one list per form and row would stop at the first error, so: a key at a time, each once.
KEYS = {s.key: s.on for row in ROWS for name in row.variant_names for s in row.spelling(name).settings}
ACTOR = "actor_rollout_ref.actor"


def outcome(compose: Callable[[list[str]], Any], overrides: list[str]) -> object:
    """What it comes to: the container without interpolations resolved, or the exception's type and text."""
    from omegaconf import OmegaConf

    try:
        composed = compose(overrides)
    except Exception as error:
        return type(error), str(error)
    return OmegaConf.to_container(composed, resolve=False), OmegaConf.is_struct(composed)


def long_way(overrides: list[str]) -> Any:
    return config.compose_from_files(overrides)


# One form each keeps this to twenty seconds; over the keys all three forms come up, for keys that verl has and has not.
@pytest.mark.parametrize(("number", "key"), list(enumerate(KEYS)))
def test_both_ways_come_to_the_same(number: int, key: str) -> None:
    overrides = [*BASE, override_text(key, KEYS[key], FORMS[number % len(FORMS)])]
    assert outcome(config.compose, overrides) == outcome(long_way, overrides)


BAD = [
    [f"{ACTOR}.megatron.no_such_key=1"],
    [f"+{ACTOR}.megatron.tensor_model_parallel_size=2"],
    [f"{ACTOR}.optim.lr=[1"],
    [f"{ACTOR}.optim.lr.more=1"],
    [f"~{ACTOR}.no_such_key"],
    ["no_such_group=1"],
    [f"{ACTOR}.optim.lr=1,2"],
    [f"{ACTOR}.optim.lr=range(1,3)"],
    ["actor@actor_rollout_ref.actor=no_such_file"],
]


@pytest.mark.parametrize("bad", BAD, ids=[b[0] for b in BAD])
def test_both_ways_raise_the_same(bad: list[str]) -> None:
    kind, _text = outcome(long_way, bad)  # type: ignore[misc]
    assert issubclass(kind, Exception)
    assert outcome(config.compose, bad) == (kind, _text)


def test_a_copy_each() -> None:
    key = f"{ACTOR}.megatron.tensor_model_parallel_size"
    assert config.compose([f"{key}=2"]).actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 2
    assert config.compose([f"{ACTOR}.optim.lr=1"]).actor_rollout_ref.actor.megatron.tensor_model_parallel_size == 1


@pytest.mark.parametrize("own", ["hydra.job.name=x", "+hydra.foo.x=1"])
def test_what_is_hydra_s_own_comes_to_the_same(own: str) -> None:
    assert outcome(config.compose, [own]) == outcome(long_way, [own])


def test_a_config_group_takes_the_long_way() -> None:
    composed = config.compose(["actor@actor_rollout_ref.actor=dp_actor"])
    assert composed.actor_rollout_ref.actor.strategy == "fsdp"


def test_the_comparison_sees_a_difference() -> None:
    overrides = [f"{ACTOR}.optim.lr=1"]
    assert outcome(config.compose, overrides) != outcome(long_way, [f"{ACTOR}.optim.lr=2"])
    assert outcome(config.compose, ["a.b=1"]) != outcome(long_way, overrides)
