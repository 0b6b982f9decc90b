"""Release lines: chosen by the installed verl, and what differs between them; the worker's route where verl 0.7 is installed."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from conformance import models, parity, releases, stack
from conformance.backend import BackendSpec
from conformance.checkout import mindspeed_for
from conformance.matrix import ROOT
from conformance.runner import Case, Runner, mask_of, results_of, scales_of
from conformance.stack import find_mindspeed
from conformance.stackfile import installed_version, stack_of

pytestmark = pytest.mark.stack

OLD = (installed_version("verl") or "").startswith("0.7.")
old_only = pytest.mark.skipif(not OLD, reason="the worker's route needs verl 0.7 (stacks/verl070-mcore012.txt)")


@pytest.mark.parametrize(
    ("version", "name", "route"),
    [
        ("0.7.0", "ppo_megatron_trainer", "worker"),
        ("0.7.1", "ppo_megatron_trainer", "worker"),
        ("0.8.0", "ppo_trainer", "engine"),
        ("0.9.1", "ppo_trainer", "engine"),
        ("unknown", "ppo_trainer", "engine"),
        (None, "ppo_trainer", "engine"),
    ],
)
def test_the_line_is_that_of_the_installed_verl(
    monkeypatch: pytest.MonkeyPatch, version: str | None, name: str, route: str
) -> None:
    monkeypatch.setattr(releases, "installed_version", lambda _name: version)
    releases.current.cache_clear()
    try:
        found = releases.current()
    finally:
        monkeypatch.undo()
        releases.current.cache_clear()
    assert found.config_name == name
    assert found.default_route == route


def test_what_a_route_needs() -> None:
    from conformance.releases import verl07, verl09

    worker = verl07.RELEASE.needs("worker", True)
    assert [text.rpartition(".")[2] for text in worker] == ["use_flash_attn=true"]
    assert verl07.RELEASE.needs("worker", False) == (), "without MindSpeed nobody knows the key"
    assert verl09.RELEASE.needs("engine", True) == ()


@pytest.mark.parametrize(
    ("verl", "torch_version", "mindspeed", "changed"),
    [
        ("0.7.0", "2.13.0", True, True),
        ("0.7.1", "2.13.0", True, True),
        ("0.7.0", "2.13.0", False, False),
        ("0.7.0", "2.8.0", True, False),
        ("0.7.2", "2.13.0", True, False),  # no stack's
        ("0.6.1", "2.13.0", True, False),
    ],
)
def test_torch_is_changed_only_where_the_stack_declares_it(
    monkeypatch: pytest.MonkeyPatch, verl: str, torch_version: str, mindspeed: bool, changed: bool
) -> None:
    import torch
    from torch.distributed import distributed_c10d

    from conformance.releases import verl07

    monkeypatch.setattr(stack, "installed_version", {"verl": verl, "torch": torch_version}.get)
    monkeypatch.setitem(sys.modules, "mindspeed.megatron_adaptor", types.ModuleType("adaptor"))
    if not mindspeed:
        monkeypatch.delitem(sys.modules, "mindspeed.megatron_adaptor")
    monkeypatch.setitem(vars(distributed_c10d), "torch", torch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: "asked without a device")
    verl07.RELEASE.prepare()
    seen = vars(distributed_c10d)["torch"]
    assert (seen is not torch) is changed
    if changed:
        assert seen.cuda.get_device_capability("npu:0") == "asked without a device"
        assert seen.Tensor is torch.Tensor


def test_a_model_built_afresh_is_not_what_somebody_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers.models.qwen3 import modeling_qwen3

    ids = torch.arange(8)[None]
    own = models.build("dense", afresh=True)(input_ids=ids).logits

    def wrong(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.weight

    monkeypatch.setattr(modeling_qwen3.Qwen3RMSNorm, "forward", wrong)
    patched = models.build("dense")(input_ids=ids).logits
    again = models.build("dense", afresh=True)(input_ids=ids).logits
    assert torch.equal(again, own)
    assert not torch.allclose(patched, own)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    # MINDSPEED_HOME may be of another branch: what belongs to this stack is fetched out of it.
    found = mindspeed_for(stack_of(installed_version("verl")), ROOT / ".tox" / "mindspeed")
    if found.home is None:
        pytest.skip(found.said)
    with Runner(BackendSpec("mindspeed", "emulated", find_mindspeed({"MINDSPEED_HOME": str(found.home)}))) as started:
        started.start()
        yield started


@old_only
@pytest.mark.mindspeed
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_worker_s_baseline_is_hugging_face_s_model(runner: Runner, model: str) -> None:
    assert runner.route == "worker"
    for role in ("actor", "ref"):
        runner.baseline(model, role, "float32")


@old_only
@pytest.mark.mindspeed
def test_the_worker_s_numbers_are_not_the_engine_s(runner: Runner) -> None:
    """The truth must follow the route: by the engine's way of averaging, the worker's grad norm is wrong."""
    from conformance.ranks import Job
    from conformance.step import StepSpec

    numbers = parity.collect(results_of(runner.step(Case("actor", "dense", 1))))
    checkpoint = runner._checkpoints["dense"]
    overrides = ("actor_rollout_ref.model.use_remove_padding=True",)
    spec = StepSpec("actor", "dense", 1, overrides, checkpoint=checkpoint, route="engine")
    report = runner._run(Job("reference", "conformance.reference:run", spec, 1, 90))
    assert report.ok, report.reason
    other = parity.collect(results_of(report))
    figures = {f.quantity: f for f in parity.against_truth(numbers, other, mask_of("dense"), "float32", scales_of("dense"))}
    assert figures["log_probs"].ok
    assert not figures["grad_norm"].ok
