"""accepted, through verl's own configuration: each way in which a key may fail to be taken turns the check's answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.accepted import FormResult, Question
from conformance.backend import BackendSpec
from conformance.matrix import Scalar
from conformance.runner import Runner

pytestmark = pytest.mark.stack

ACTOR = "actor_rollout_ref.actor.megatron."
REF = "actor_rollout_ref.ref.megatron."
OVERRIDE = "override_transformer_config."


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(BackendSpec("plain", "emulated")) as started:
        started.start()
        yield started


def ask(runner: Runner, key: str, value: Scalar, inherited: str = "") -> dict[str, FormResult]:
    role = "actor" if key.startswith(ACTOR) else "ref"
    question = Question(role, ((key, value),), (), ((inherited, value),) if inherited else ())
    return {form.form: form for form in runner.accepted(1, (question,))[role]}


def works(forms: dict[str, FormResult]) -> set[str]:
    return {name for name, form in forms.items() if form.works}


def test_a_key_of_verl_s_yaml_is_taken_plain(runner: Runner) -> None:
    assert works(ask(runner, ACTOR + "tensor_model_parallel_size", 1)) == {"plain", "++"}


def test_a_new_key_under_the_open_mapping_needs_a_plus(runner: Runner) -> None:
    forms = ask(runner, ACTOR + OVERRIDE + "use_flash_attn", True)
    assert works(forms) == {"+", "++"}
    plain = forms["plain"].raised
    assert plain is not None
    assert plain.type == "hydra.errors.ConfigCompositionException"


def test_an_unknown_engine_key_composes_and_is_refused_by_the_dataclass(runner: Runner) -> None:
    forms = ask(runner, ACTOR + "no_such_size", 2)
    assert works(forms) == set()
    plus = forms["+"].raised
    assert plus is not None
    assert "no_such_size" in plus.message


def test_a_value_that_does_not_reach_the_engine_is_not_taken(runner: Runner) -> None:
    # verl switches sequence parallelism off again at TP=1: composing and validating is not enough.
    forms = ask(runner, ACTOR + "sequence_parallel", True)
    assert works(forms) == set()
    assert forms["plain"].raised is None
    assert forms["plain"].missing == (ACTOR + "sequence_parallel",)


def test_writing_under_ref_drops_what_it_inherits_and_inheriting_does_not(runner: Runner) -> None:
    forms = ask(runner, REF + OVERRIDE + "use_flash_attn", True, inherited=ACTOR + OVERRIDE + "use_flash_attn")
    assert works(forms) == {"+", "++", "inherited"}
    assert "attention_backend" in forms["+"].lost
    assert forms["inherited"].lost == ()
