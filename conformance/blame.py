"""Whose failure is it, and of which kind? From a captured exception to an outcome and an owner.

- Ours: the innermost frame lies in this project (the plain backend, the emulated NPU, the step), unless it is an emulated
  operator that turns away invalid input as the vendor's would: that is its caller's doing.
- `refused`: upstream turned the setting away: a `raise` or `assert` written in upstream code, or, before the first step, an
  error whose text names one of the keys that were set (an unexpected keyword argument).
- `crash`: anything else.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from conformance.ranks import Frame, JobReport, Raised
from conformance.results import UpstreamException

HERE = Path(__file__).resolve().parent
#: Directory name on the path of a frame -> owner. The first match from the innermost frame outwards owns the failure.
OWNERS = {
    "mindspeed": "MindSpeed",
    "verl": "verl",
    "megatron": "megatron-core",
    "mbridge": "bridge",
    "hydra": "verl",  # Hydra and OmegaConf speak for the configuration that verl ships
    "omegaconf": "verl",
    "transformers": "transformers",
}
#: A statement that turns something away, also behind a condition on the same line.
_DELIBERATE = re.compile(r"(^|:\s*)(raise|assert)\b")

Kind = Literal["refused", "crash", "error"]


def owner_of(raised: Raised) -> str:
    """The package whose code the failure rose in; `conformance` for ours."""
    for frame in reversed(raised.frames):
        if _is_ours(frame):
            if _is_operator_refusal(frame, raised):
                continue  # the emulated operator speaks for the hardware: the caller owns the failure
            return "conformance"
        owner = _upstream(frame)
        if owner:
            return owner
    return "conformance"


def upstream_frame(raised: Raised) -> Frame | None:
    """The innermost frame in upstream code."""
    return next((frame for frame in reversed(raised.frames) if _upstream(frame)), None)


def kind_of(raised: Raised, keys: Iterable[str]) -> Kind:
    """`keys`: the full dotted keys that the case set."""
    if owner_of(raised) == "conformance":
        return "error"
    innermost = next((frame for frame in reversed(raised.frames) if not _is_probe(frame)), None)
    # The line of an assert that spans several lines is the one that was being evaluated: there only the type tells.
    deliberate = raised.type == "AssertionError" or (innermost and _DELIBERATE.search(innermost.source))
    if innermost is not None and _upstream(innermost) and deliberate:
        return "refused"
    leaves = {key.rpartition(".")[2] for key in keys}
    named = any(f"'{leaf}'" in raised.message for leaf in leaves)
    return "refused" if named and raised.type in ("TypeError", "AttributeError") else "crash"


def record_of(raised: Raised) -> UpstreamException:
    """The exception as it goes into results: type, first line of the message, the upstream frame, the owner."""
    frame = upstream_frame(raised)
    first_line = raised.message.strip().partition("\n")[0][:500]
    place = f"{short_path(frame.file)}:{frame.line} {frame.function}" if frame else "no upstream frame"
    return UpstreamException(type=raised.type, message=first_line, frame=place, owner=owner_of(raised))


def text_of(exception: UpstreamException) -> str:
    """Type and message on one line; the type alone, with its place, where there is no message."""
    return f"{exception.type}: {exception.message}" if exception.message else f"{exception.type} in {exception.frame}"


def place_of(error: BaseException) -> str:
    """The innermost frame of an exception of this process: file, line, function."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{short_path(frame.filename)}:{frame.lineno} {frame.name}"


def failure_of(report: JobReport, keys: Iterable[str]) -> tuple[Kind, str, UpstreamException | None]:
    """Outcome, one sentence, and the exception of a job that did not end well."""
    first = report.ranks[report.failed_first] if report.failed_first is not None else None
    if first is None or first.raised is None:
        return "crash", report.reason, None
    exception = record_of(first.raised)
    kind = kind_of(first.raised, keys)
    return kind, text_of(exception), exception


def short_path(file: str) -> str:
    """A path from its package on: no machine's directories in a report."""
    parts = Path(file).parts
    for i in range(len(parts) - 2, -1, -1):
        if parts[i] == "site-packages":
            return "/".join(parts[i + 1 :])
    for i, part in enumerate(parts):
        package = Path(*parts[: i + 1])
        # `megatron` is a namespace package: in a checkout it is known by what it holds.
        if part in OWNERS and ((package / "__init__.py").exists() or (package / "core" / "__init__.py").exists()):
            return "/".join(parts[i:])
    return parts[-1] if parts else file


def _is_ours(frame: Frame) -> bool:
    return Path(frame.file).is_relative_to(HERE) and not _is_probe(frame)


def _is_probe(frame: Frame) -> bool:
    """A probe passes through what it observes: an error in its frame is that of the code that it observes."""
    return Path(frame.file).is_relative_to(HERE / "probes")


def _is_operator_refusal(frame: Frame, raised: Raised) -> bool:
    """Said on purpose, by a `raise` of the emulated operators; what goes wrong in their arithmetic is our own fault."""
    said = next((frame for frame in reversed(raised.frames) if not _is_probe(frame)), frame)
    in_operators = all("torch_npu/ops" in Path(each.file).as_posix() for each in (frame, said))
    return in_operators and bool(_DELIBERATE.search(said.source)) and raised.type in ("RuntimeError", "ValueError", "TypeError")


def _upstream(frame: Frame) -> str | None:
    if Path(frame.file).is_relative_to(HERE) or (
        frame.file.startswith(sys.base_prefix + "/lib/python3") and "site-packages" not in frame.file
    ):
        return None
    path = short_path(frame.file)
    return OWNERS.get(path.partition("/")[0])
