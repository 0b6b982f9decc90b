"""The backend: MindSpeed itself, or the plain stand-in for Transformer Engine. Imports the stack inside the rank server."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import warnings
from dataclasses import dataclass

from conformance.npu import Mode
from conformance.parking import Parked
from conformance.results import Package
from conformance.stack import BackendName, MindSpeed, collect

#: Set in the server before Python starts. One thread per rank: ranks share the cores, and a forked thread pool is no pool.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",  # repatching wakes all lazy modules of transformers, and each writes warnings
    "TORCHDYNAMO_DISABLE": "1",  # compiling a four-layer model costs more than running it
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron-core asks for it with TP and SP
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


@dataclass(frozen=True)
class BackendSpec:
    """What the rank server imports."""

    name: BackendName
    npu: Mode
    mindspeed: MindSpeed | None = None


@dataclass(frozen=True)
class Imported:
    """What the server imported: `device` is `npu` or `emulated`."""

    device: str
    packages: tuple[Package, ...]


#: Imported before the first fork, since every rank needs them and an import costs more than a step.
_WARM = (
    "megatron.core.models.gpt.gpt_model",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "conformance.step",
    "conformance.reference",
    "conformance.accepted",
    "conformance.probes.trace",
    "conformance.probes.calls",
    "conformance.probes.reads",
    "conformance.probes.structure",
)


#: Large packages that come along with verl and take no part in a step; see `parking`.
_IDLE = (
    "PIL", "absl", "accelerate", "antlr4", "anyio", "attr", "chardet", "datasets", "dateutil", "dill", "distutils",
    "google", "h11", "httpcore", "httpx", "huggingface_hub", "jinja2", "jsonschema", "mpmath", "multiprocess", "networkx",
    "numpy.f2py", "numpy.polynomial", "opentelemetry", "pandas", "peft", "pyarrow", "pygments", "ray", "rich",
    "scipy", "setuptools", "sympy", "tensorboard", "tokenizers", "torch._dynamo", "torch._inductor", "torch._numpy", "torch.ao",
    "torch.distributions", "torch.export", "torch.onnx", "torch.package", "torch.quantization", "torch.testing",
    "transformers.generation", "transformers.integrations", "transformers.loss", "transformers.quantizers", "unittest",
    "wandb",
)  # fmt: skip


def idle_packages() -> tuple[str, ...]:
    """The above, and transformers' models, each by itself: a step has one or two of them brought back."""
    names = {".".join(name.split(".")[:3]) for name in sys.modules if name.startswith("transformers.models.")}
    return (*_IDLE, *sorted(names))


def preload(spec: BackendSpec) -> Imported:
    """Import the whole stack, in the order that it needs. Runs in the rank server, and in spawned ranks."""
    from conformance import config, extensions, npu, plain, releases

    sys.argv = sys.argv[:1]  # MindSpeed parses the command line at import
    os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    if spec.mindspeed is not None:
        sys.path.insert(0, str(spec.mindspeed.home))
    device = npu.activate(spec.npu, mindspeed=spec.name == "mindspeed")
    import torch

    torch.set_num_threads(1)
    release = releases.current()
    # As in a real run. Up to 0.8 verl takes the device for CUDA when MindSpeed has been there before it.
    importlib.import_module("verl")
    if spec.name == "mindspeed":
        # Before megatron.core, which looks for Transformer Engine and Apex when it is imported.
        importlib.import_module("mindspeed.megatron_adaptor")
        if device.name == "emulated":  # on hardware MindSpeed compiles its own when it first needs them
            npu.install_kernels()
    else:
        plain.activate()
        importlib.import_module("torch_npu.contrib.transfer_to_npu")  # MindSpeed does this itself
    for name in (*release.warm, *_WARM):
        importlib.import_module(name)
    release.prepare()
    for group in (extensions.MODELS, extensions.PROBES):
        extensions.entry_points(group)  # their metadata is read once, not in each rank
    config.compose(config.base_overrides("", 1, 1))  # what all ranks' compositions start from
    if spec.name == "mindspeed":
        _wake_lazy_modules()
        Parked(idle_packages())
    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # its monitor is a thread, and threads do not survive a fork
    return Imported(device.name, collect(spec.mindspeed))


def _wake_lazy_modules() -> None:
    """Ask every module for a name that none has, once, in the server.

    MindSpeed's repatch asks all of sys.modules for a hundred names, in every rank; transformers' lazy modules answer the
    first time by importing themselves, which took most of a case's time. After this they are imported before the fork.
    """
    for module in list(sys.modules.values()):
        with contextlib.suppress(Exception):  # whatever a module raises here, the ranks will see for themselves
            hasattr(module, "no_module_has_this_name")
