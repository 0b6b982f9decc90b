"""Tiny random models and the one fixed batch that every case runs on.

`fixtures/*.json` hold the configurations in a form of their own: the checkpoint directory is written by the installed
transformers, so that no file in the repository depends on one transformers version. Weights are drawn from a seed. Other
packages add models by entry points, see `extensions`.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance import extensions
from conformance.errors import UsageFault

if TYPE_CHECKING:
    import torch

    from conformance.ranks import RankContext

#: The repository's `fixtures/`, by a link, so that an installed package has them too.
FIXTURES = Path(__file__).resolve().parent / "fixtures"

#: Prompt and response columns of the batch, in tokens.
PROMPT, RESPONSE = 16, 16
#: Valid prompt tokens (left-padded) and valid response tokens (right-padded) of each sequence. Unequal on purpose: a
#: one-token response, a one-token prompt, full rows, and lengths that no parallel size divides.
LENGTHS = ((16, 16), (9, 1), (1, 13), (16, 7), (5, 16), (12, 11), (3, 2), (14, 15))


@dataclass(frozen=True)
class Fixture:
    """One stored model configuration."""

    name: str
    config_class: str
    model_class: str
    seed: int
    config: dict[str, Any]
    #: verl overrides without which the stack cannot build the model at all; each has a comment in the fixture.
    overrides: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])


def built_in() -> tuple[str, ...]:
    """The suite's own models."""
    return tuple(sorted(path.stem for path in FIXTURES.glob("*.json")))


def names() -> tuple[str, ...]:
    """The suite's own models, then those of other packages."""
    return (*built_in(), *extensions.names(extensions.MODELS, built_in()))


@functools.cache
def load(name: str) -> Fixture:
    """Read `fixtures/<name>.json`, or the file of another package; UsageFault when there is none or it is broken."""
    path = FIXTURES / f"{name}.json"
    if name in extensions.entry_points(extensions.MODELS):
        path = extensions.model_file(name)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        fields: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in raw.items() if not k.startswith("comment")
        }
        return Fixture(name=name, **fields)
    except FileNotFoundError:
        raise UsageFault(f"{path.name}: no such model fixture; there are: {', '.join(names())}") from None
    except (ValueError, TypeError, OSError) as fault:
        raise UsageFault(f"{path.parent.name}/{path.name}: not a model fixture ({fault})") from None


def build(name: str, *, afresh: bool = False) -> Any:
    """The fixture as Hugging Face's model with its drawn weights, float32, plain attention and expert loops.

    `afresh`: its code is loaded once more, since verl patches NPU operators into Hugging Face's classes where there is an NPU.
    """
    import torch
    import transformers

    fixture = load(name)
    model_class = getattr(transformers, fixture.model_class)
    if afresh:
        model_class = getattr(importlib.reload(sys.modules[model_class.__module__]), fixture.model_class)
    config = getattr(transformers, fixture.config_class)(**fixture.config, architectures=[fixture.model_class])
    config.dtype = torch.float32
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = model_class(config).float()
    draw_weights(model, fixture.seed)
    return model


def write_checkpoint(name: str, directory: Path) -> Path:
    """Write the fixture as a Hugging Face checkpoint (float32 safetensors, tokenizer) and return its directory."""
    target = directory / name
    # In shards with an index, as large checkpoints come: mbridge's DeepSeek-V3 loader reads the index.
    build(name).save_pretrained(target, max_shard_size="200KB")
    _write_tokenizer(load(name), target)
    return target


@dataclass(frozen=True)
class CheckpointSpec:
    """Which fixtures to write, and where."""

    names: tuple[str, ...]
    directory: str


def write_checkpoints(spec: CheckpointSpec, _context: RankContext) -> dict[str, str]:
    """Rank-server target: write the fixtures and return name -> checkpoint directory. UsageFault for one that cannot be built."""
    written: dict[str, str] = {}
    for name in spec.names:
        try:
            written[name] = str(write_checkpoint(name, Path(spec.directory)))
        except UsageFault:
            raise
        except Exception as fault:  # transformers answers a wrong configuration with all sorts of them
            first = str(fault).strip().partition("\n")[0][:200]
            raise UsageFault(f"model {name!r}: transformers cannot build it: {type(fault).__name__}: {first}") from fault
    return written


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter in place.

    Matrices get a standard deviation of 1/sqrt(fan-in), so that activations stay of order one and a wrong mask, scale or
    rotary angle is far above rounding; norm weights lie around one, so that a lost weight shows; buffers that a
    checkpoint carries (the router's bias) are drawn as well.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    persistent = dict(model.state_dict(keep_vars=True))
    with torch.no_grad():
        for name in sorted(persistent):
            tensor = persistent[name]
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            if "norm" in name and tensor.dim() == 1:
                tensor.copy_(1.0 + 0.2 * noise)
            elif "embed" in name:
                tensor.copy_(noise)
            elif tensor.dim() == 1:
                tensor.copy_(0.1 * noise)
            elif name.endswith("mlp.gate.weight"):
                # A decided router: near-ties would turn rounding into another expert, which no bound can hold.
                tensor.copy_(4.0 * noise / math.sqrt(tensor.shape[-1]))
            else:
                tensor.copy_(noise / math.sqrt(tensor.shape[-1]))


def _write_tokenizer(fixture: Fixture, target: Path) -> None:
    """A word-level tokenizer over the vocabulary: verl reads one, no case tokenizes text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pad, eos = fixture.config["pad_token_id"], fixture.config["eos_token_id"]
    words = {i: f"t{i}" for i in range(fixture.vocabulary)}
    words.update({pad: "<pad>", eos: "<eos>", fixture.vocabulary - 1: "<unk>"})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in words.items()}, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(target)


@dataclass(frozen=True)
class Batch:
    """The fixed batch. All tensors on the CPU; B = len(LENGTHS), S = PROMPT + RESPONSE.

    input_ids, attention_mask, position_ids: (B, S) int64. response_mask: (B, RESPONSE) int64.
    advantages, old_log_probs, ref_log_prob: (B, RESPONSE) float32 (log-probs in nats).
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    response_mask: torch.Tensor
    advantages: torch.Tensor
    old_log_probs: torch.Tensor
    ref_log_prob: torch.Tensor


def make_batch(fixture: Fixture) -> Batch:
    """Left-padded prompts and right-padded responses of the lengths in LENGTHS, from a seed."""
    import torch

    generator = torch.Generator().manual_seed(fixture.seed + 1)
    pad = int(fixture.config["pad_token_id"])
    ids = torch.randint(0, pad, (len(LENGTHS), PROMPT + RESPONSE), generator=generator)
    mask = torch.zeros_like(ids)
    for i, (prompt, response) in enumerate(LENGTHS):
        mask[i, PROMPT - prompt : PROMPT + response] = 1
    ids = torch.where(mask.bool(), ids, pad)
    shape = (len(LENGTHS), RESPONSE)
    # Around the log-prob of a uniform guess, so that PPO's ratio is neither clipped everywhere nor nowhere.
    old = -math.log(fixture.vocabulary) + 0.1 * torch.randn(shape, generator=generator)
    return Batch(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp_min(0) * mask,
        response_mask=mask[:, PROMPT:].clone(),
        advantages=torch.randn(shape, generator=generator),
        old_log_probs=old,
        ref_log_prob=old + 0.05 * torch.randn(shape, generator=generator),
    )
