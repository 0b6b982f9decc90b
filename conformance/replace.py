"""Replacing a file in one step: whoever reads it, and a full disk, finds the old one or the new one."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from conformance.errors import UsageFault


def replace_file(path: Path, content: bytes, check: Callable[[Path], None] = lambda _fresh: None) -> None:
    """Give the file another content, which `check` may look at first and refuse; UsageFault when the disk does not take it."""
    path = path.resolve()  # through a link
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        check(fresh)
        shutil.copymode(path, fresh)
        os.replace(fresh, path)
    except OSError as fault:
        raise UsageFault(f"{path}: cannot be written: {fault.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
