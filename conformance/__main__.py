"""`python -m conformance`: what the suite knows without running the stack."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from conformance.errors import ConformanceError, UsageFault
from conformance.matrix import ROLES, Row, load_matrix
from conformance.report.short import insert, short_table
from conformance.results import read_results


@click.group(help=__doc__)
def main() -> None:
    """The command group."""


@main.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--into", type=click.Path(path_type=Path), help="Markdown file with a place for the table (see README.md)")
def table(results: Path, into: Path | None) -> None:
    """The short support table of a result set; with --into, written into a Markdown file."""
    text = short_table(read_results(results), load_matrix().rows)
    if into is None:
        click.echo(text)
    else:
        insert(into, text)


@main.command()
@click.argument("row")
def explain(row: str) -> None:
    """How to write a row's overrides, for actor and for ref, ready to paste."""
    matrix = load_matrix()
    if row not in set(matrix.ids()):
        raise UsageFault(f"{row}: no such row; right form: one of {', '.join(matrix.ids())}")
    click.echo("\n".join(_explanation(matrix[row])))


def _explanation(row: Row) -> list[str]:
    lines = [f"{row.id}: {row.title.en} ({row.name}, {row.title.zh})", f"implemented by {row.implemented_by}, {row.status}"]
    if row.topology.sizes():
        lines.append("needs " + ", ".join(f"{k}={v}" for k, v in row.topology.sizes().items()))
    for note in (row.note, *(row.spelling(v).note for v in row.variant_names)):
        if note:
            lines.append(note.en)
    for variant in row.variant_names:
        lines.append("")
        lines.append("as documented:" if variant == "documented" else f"variant {variant}:")
        for role in ROLES:
            own, inherited = _role_overrides(row, variant, role)
            lines.append(f"  {role}:" + (" inherits the actor's" if inherited else ""))
            lines += [f"    {_quoted(text)} \\" for text in own]
    lines += [
        "",
        "'++' writes a key of override_transformer_config whether verl's YAML has it or not; '+' fails for the ones it has.",
        "Do not write '+' or '++' under ref's override_transformer_config: it replaces what ref inherits from the actor.",
    ]
    return lines


def _role_overrides(row: Row, variant: str, role: str) -> tuple[list[str], bool]:
    """The overrides that the role's own keys need, and whether it inherits the actor's instead."""
    everything = row.overrides(variant, "on")
    own = [text for text in everything if f"actor_rollout_ref.{role}." in text]
    settings = [s for s in row.spelling(variant).settings if s.key.startswith(f"actor_rollout_ref.{role}.")]
    if role == "ref" and not settings:
        return list(everything), True
    return own, False


def _quoted(text: str) -> str:
    """For a POSIX shell: in single quotes where the shell would read a character as its own."""
    import shlex

    return shlex.quote(text)


def run() -> int:
    """The commands with the suite's exit codes: a ConformanceError is one line on stderr."""
    try:
        main(standalone_mode=False)
    except ConformanceError as fault:
        click.echo(f"error: {fault}", err=True)
        return fault.exit_code
    except click.ClickException as fault:
        fault.show()
        return UsageFault.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(run())
