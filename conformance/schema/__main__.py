"""`python -m conformance.schema`: write the schemas next to this file."""

from __future__ import annotations

import sys

import click

from conformance.__main__ import run
from conformance.schema import DIRECTORY, texts


@click.command(help="Write the published JSON schemas, made from the models of the code.")
def write_schemas() -> None:
    for name, text in texts().items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run(write_schemas, "conformance.schema"))
