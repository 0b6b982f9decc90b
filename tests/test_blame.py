"""blame: whose failure, and of which kind, on made-up exceptions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.blame import HERE, OWNERS, failure_of, kind_of, owner_of, record_of, short_path
from conformance.ranks import Frame, JobReport, Raised, RankReport

SITE = "/opt/venv/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch/nn/modules/module.py"
VERL = f"{SITE}/verl/workers/config/engine.py"
CORE = f"{SITE}/megatron/core/transformer/attention.py"
STEP = str(HERE / "step.py")
OPERATOR = str(HERE / "npu/site/torch_npu/ops/attention.py")
KEY = "actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn"


def raised(kind: str, message: str, *frames: tuple[str, str]) -> Raised:
    """An exception with frames (file, source line), from the outermost inwards."""
    return Raised(kind, message, tuple(Frame(f, i, f"f{i}", source) for i, (f, source) in enumerate(frames)), "", None)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A source checkout of MindSpeed in a directory of the package's own name, and one of Megatron-LM."""
    root = tmp_path_factory.mktemp("mindspeed")
    for file in (
        "mindspeed/__init__.py",
        "mindspeed/core/fusions/rms_norm.py",
        "Megatron-LM/megatron/core/__init__.py",
    ):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    yield root  # noqa: PT022


@pytest.fixture(scope="module")
def mindspeed(checkout: Path) -> str:
    return str(checkout / "mindspeed/core/fusions/rms_norm.py")


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        (VERL, "verl"),
        (CORE, "megatron-core"),
        (f"{SITE}/mbridge/core/bridge.py", "bridge"),
        (f"{SITE}/hydra/_internal/config_loader_impl.py", "verl"),
        (f"{SITE}/omegaconf/base.py", "verl"),
        (f"{SITE}/transformers/models/qwen3/modeling_qwen3.py", "transformers"),
    ],
)
@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError("no")',
        "raise ValueError(",
        "raise",
        "assert size > 1, size",
        "assert(size > 1)",
        'if size > 1: raise ValueError("no")',
    ],
)
def test_what_upstream_raises_is_refused(file: str, owner: str, source: str) -> None:
    error = raised("ValueError", "no", (STEP, "engine.initialize()"), (file, source))
    assert kind_of(error, [KEY]) == "refused"
    assert owner_of(error) == owner


def test_assert_over_several_lines_is_refused() -> None:
    # Python then gives the line that was being evaluated, which has no `assert` on it.
    assert kind_of(raised("AssertionError", "", (CORE, "self.config.sequence_parallel")), [KEY]) == "refused"


@pytest.mark.parametrize("source", ["raised = call()", "self.assertion(x)", "x = tree['raise']", "reraise(error)"])
def test_words_that_only_look_like_raise_are_a_crash(source: str) -> None:
    assert kind_of(raised("ValueError", "no", (CORE, source)), [KEY]) == "crash"


def test_failure_deep_in_torch_is_a_crash_of_its_caller(mindspeed: str) -> None:
    error = raised(
        "AttributeError",
        "'NoneType' object has no attribute 'shape'",
        (STEP, "engine.initialize()"),
        (CORE, "out = norm(x)"),
        (mindspeed, "return torch.rms(x)"),
        (TORCH, "raise AttributeError("),
    )
    assert kind_of(error, [KEY]) == "crash"
    assert owner_of(error) == "MindSpeed"
    assert record_of(error).frame == "mindspeed/core/fusions/rms_norm.py:2 f2"


@pytest.mark.parametrize("kind", ["TypeError", "AttributeError"])
def test_text_that_names_a_key_is_refused(kind: str) -> None:
    message = "TransformerConfig.__init__() got an unexpected keyword argument 'use_flash_attn'"
    error = raised(kind, message, (VERL, "return TransformerConfig(**kwargs)"))
    assert kind_of(error, [KEY]) == "refused"
    assert owner_of(error) == "verl"
    assert kind_of(error, ["actor_rollout_ref.actor.megatron.other"]) == "crash"
    assert kind_of(error, ["actor_rollout_ref.actor.use_flash_attn_too"]) == "crash"
    assert kind_of(replace(error, type="RuntimeError"), [KEY]) == "crash"


@pytest.mark.parametrize(
    "file",
    [
        "plain/site/transformer_engine/pytorch/attention.py",
        "npu/__init__.py",
        "npu/site/torch_npu/__init__.py",
        "step.py",
    ],
)
def test_failure_inside_this_project_is_an_error(file: str) -> None:
    error = raised("RuntimeError", "no", (CORE, "super().forward(x)"), (str(HERE / file), "raise RuntimeError(x)"))
    assert kind_of(error, [KEY]) == "error"
    assert owner_of(error) == "conformance"


def test_failure_of_torch_called_from_this_project_is_an_error() -> None:
    plain = str(HERE / "plain/site/transformer_engine/pytorch/linear.py")
    error = raised("RuntimeError", "shapes", (CORE, "super().forward(x)"), (plain, "x @ w"), (TORCH, "raise x"))
    assert kind_of(error, [KEY]) == "error"


@pytest.mark.parametrize("kind", ["RuntimeError", "ValueError", "TypeError"])
def test_refusal_by_an_emulated_operator_is_its_callers_doing(kind: str, mindspeed: str) -> None:
    error = raised(kind, "sparse_mode 9", (CORE, "f(x)"), (mindspeed, "npu_op(x)"), (TORCH, ""), (OPERATOR, "raise x"))
    assert owner_of(error) == "MindSpeed"
    assert kind_of(error, [KEY]) == "crash"
    assert record_of(error).frame.startswith("mindspeed/")


@pytest.mark.parametrize("kind", ["NotImplementedError", "AssertionError", "KeyError"])
def test_gap_in_an_emulated_operator_is_ours(kind: str, mindspeed: str) -> None:
    error = raised(kind, "not emulated", (mindspeed, "npu_op(x)"), (OPERATOR, "raise NotImplementedError(x)"))
    assert owner_of(error) == "conformance"
    assert kind_of(error, [KEY]) == "error"


@pytest.mark.parametrize("kind", ["RuntimeError", "TypeError", "ValueError"])
@pytest.mark.parametrize("deeper", [(), ((TORCH, "raise RuntimeError(x)"),)])
def test_wrong_arithmetic_in_an_emulated_operator_is_ours(kind: str, deeper: tuple[tuple[str, str], ...], mindspeed: str) -> None:
    said = "The size of tensor a (64) must match the size of tensor b (63)"
    error = raised(kind, said, (mindspeed, "npu_op(x)"), (OPERATOR, "return (x * rstd * wide(gamma))"), *deeper)
    assert owner_of(error) == "conformance"
    assert kind_of(error, [KEY]) == "error"


def test_operator_that_this_project_called_is_ours() -> None:
    error = raised("RuntimeError", "no", (STEP, "check_device()"), (OPERATOR, "raise RuntimeError(x)"))
    assert kind_of(error, [KEY]) == "error"


@pytest.mark.parametrize("frames", [(), ((TORCH, "raise x"),)])
def test_failure_without_an_owner_is_ours(frames: tuple[tuple[str, str], ...]) -> None:
    error = raised("RuntimeError", "no", *frames)
    assert kind_of(error, [KEY]) == "error"
    assert record_of(error).frame == "no upstream frame"


def test_standard_library_owns_nothing() -> None:
    # Its `verl.py` would be nobody's; a package below it, in site-packages, is somebody's.
    library = f"{sys.base_prefix}/lib/python3.11"
    error = raised("KeyError", "x", (VERL, "call()"), (f"{library}/enum.py", "raise KeyError(x)"))
    assert owner_of(error) == "verl"
    assert kind_of(error, [KEY]) == "crash"
    inner = raised("KeyError", "x", (f"{library}/site-packages/megatron/core/a.py", "raise KeyError(x)"))
    assert owner_of(inner) == "megatron-core"


def test_record_keeps_the_first_line_of_the_message() -> None:
    record = record_of(raised("ValueError", "\nfirst\nsecond", (VERL, "raise x")))
    assert (record.type, record.message, record.owner) == ("ValueError", "first", "verl")
    assert record.frame == "verl/workers/config/engine.py:0 f0"
    assert len(record_of(raised("ValueError", "x" * 9000, (VERL, "raise x"))).message) == 500


def report(*ranks: RankReport, failed_first: int | None, reason: str) -> JobReport:
    return JobReport("job", "raised", ranks, 1.0, reason, failed_first)


def rank(number: int, error: Raised | None) -> RankReport:
    return RankReport(number, "raised" if error else "died", None, error, 1, None, "", "")


def test_the_first_failure_of_a_job_counts() -> None:
    follower = raised("RuntimeError", "connection closed", (TORCH, "raise x"))
    first = raised("ValueError", "no", (VERL, "raise ValueError(x)"))
    kind, text, exception = failure_of(report(rank(0, follower), rank(1, first), failed_first=1, reason="r"), [KEY])
    assert (kind, text) == ("refused", "ValueError: no")
    assert exception is not None
    assert exception.owner == "verl"


def test_rank_that_died_is_a_crash_with_the_servers_reason() -> None:
    died = report(rank(0, None), failed_first=0, reason="rank 0 died of SIGSEGV")
    assert failure_of(died, [KEY]) == ("crash", "rank 0 died of SIGSEGV", None)


def test_short_path_of_a_checkout_starts_at_the_package(checkout: Path) -> None:
    assert short_path(f"{checkout}/mindspeed/core/fusions/rms_norm.py") == "mindspeed/core/fusions/rms_norm.py"
    # A namespace package has no __init__.py of its own.
    assert short_path(f"{checkout}/Megatron-LM/megatron/core/optimizer/a.py") == "megatron/core/optimizer/a.py"
    assert short_path(f"{checkout}/mindspeed.py") == "mindspeed.py"


WORD = st.text(st.characters(codec="ascii", categories=("Ll", "Nd"), include_characters="-_."), min_size=1, max_size=9)
PART = st.one_of(WORD.filter(lambda word: word not in (".", "..")), st.sampled_from([*OWNERS, "site-packages", "core"]))


@given(directories=st.lists(PART, min_size=1), file=PART)
def test_short_path_never_shows_a_machines_directories(directories: list[str], file: str) -> None:
    # None of these exist, so only what lies in site-packages may keep more than its file name.
    whole = "/" + "/".join(["no-such-root", *directories, file])
    short = short_path(whole)
    assert not short.startswith("/")
    assert "no-such-root" not in short
    assert "site-packages" not in Path(short).parts[:-1]
    assert whole.endswith("/" + short)
    if "site-packages" not in directories:
        assert short == file


def test_short_path_of_what_is_no_path() -> None:
    assert short_path("<string>") == "<string>"
    assert short_path("") == ""
