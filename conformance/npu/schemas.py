"""`python -m conformance.npu.schemas`: the emulation's operator schemas against the vendor's, of several torch_npu versions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import torch

from conformance.errors import UsageFault
from conformance.npu import vendor
from conformance.npu.vendor import VERSIONS, VendorFacts


def differences(ours: str, theirs: str) -> list[str]:
    """What differs between two schemas of one operator, in words: every argument, default and return. Empty when nothing does."""
    here, there = parsed(ours), parsed(theirs)
    found = [] if _name(here) == _name(there) else [f"named {_name(there)}, not {_name(here)}"]
    found += _arguments(here.arguments, there.arguments)
    if len(here.returns) != len(there.returns):
        found.append(f"returns {len(there.returns)} values, not {len(here.returns)}")
    elif _listed(here.returns) != _listed(there.returns):
        found.append(f"returns {_listed(there.returns)}, not {_listed(here.returns)}")
    if not found and str(here) != str(there):  # what torch prints and nothing above looks at
        found.append(f"is {there}, not {here}")
    return found


def mistaken(ours: Mapping[str, str], theirs: Mapping[str, str], version: str) -> list[str]:
    """A line for every operator of ours whose schema is not the vendor's of that version, or that it lacks."""
    lines = []
    for op, schema in ours.items():
        if op not in theirs:
            lines.append(f"{op}: torch_npu {version} has no such operator")
        elif found := differences(schema, theirs[op]):
            lines.append(f"{op}: in torch_npu {version} {'; '.join(found)}")
    return lines


def parsed(schema: str) -> Any:
    """torch's own reading of a schema; UsageFault when it is none."""
    try:
        return torch._C.parse_schema(schema)
    except RuntimeError as fault:
        raise UsageFault(f"{schema}: not an operator schema: {str(fault).strip().splitlines()[0]}") from None


def facts_of(declared: Mapping[str, Mapping[str, str]]) -> VendorFacts:
    """The facts that are kept, from version -> operator -> schema."""
    ours = vendor.emulated_schemas()
    schemas: dict[str, dict[str, list[str]]] = {op: {} for op in ours}
    for version, theirs in declared.items():
        for op in ours.keys() & theirs.keys():
            schemas[op].setdefault(str(parsed(theirs[op])), []).append(version)
    return VendorFacts(
        written_by=f"{vendor.WRITE}, from the strings of {Path(vendor.LIBRARY).name} in torch_npu's wheels",
        declared={version: len(theirs) for version, theirs in declared.items()},
        others={v: vendor.families({op: s for op, s in theirs.items() if op not in ours}) for v, theirs in declared.items()},
        schemas=schemas,
        differences={
            version: {op: found for op in ours if op in theirs and (found := differences(ours[op], theirs[op]))}
            for version, theirs in declared.items()
        },
    )


def _name(schema: Any) -> str:
    return f"{schema.name}.{schema.overload_name}".rstrip(".").removeprefix("npu::")


def _arguments(here: list[Any], there: list[Any]) -> Iterator[str]:
    ours, theirs = ({argument.name: argument for argument in side} for side in (here, there))
    if missing := [name for name in ours if name not in theirs]:
        yield f"lacks {', '.join(missing)}"
    if more := [name for name in theirs if name not in ours]:
        yield f"has also {', '.join(more)}"
    common = [name for name in ours if name in theirs]
    for name in common:
        for what, mine, its in zip(("type", "default", "way of passing"), _facts(ours[name]), _facts(theirs[name]), strict=True):
            if mine != its:
                yield f"{name}'s {what} is {its}, not {mine}"
    if common != [name for name in theirs if name in ours]:
        yield f"the order is {', '.join(theirs)}"


def _facts(argument: Any) -> tuple[str, str, str]:
    default = repr(argument.default_value) if argument.has_default_value() else "absent"
    return _type(argument), default, "by keyword only" if argument.kwarg_only else "by position"


def _type(argument: Any) -> str:
    # real_type, because for `type` ScalarType and SymInt are int.
    written = argument.alias_info is not None and argument.alias_info.is_write
    return f"{argument.real_type}{' written to' if written else ''}"


def _listed(returns: list[Any]) -> str:
    return ", ".join(f"{_type(value)} {value.name or ''}".strip() for value in returns)


@click.group(help=__doc__)
def main() -> None:
    """The command group."""


@main.command()
def fetch() -> None:
    """Download the wheels that the tests read, 130 MB, into the cache; those that are there stay."""
    for version in VERSIONS:
        click.echo(f"torch_npu {version}: {vendor.fetch(version)}")


@main.command()
def write() -> None:
    """Write vendor_schemas.json from the cached wheels."""
    wheels = {version: vendor.wheel(version) for version in VERSIONS}
    if lacking := [version for version, path in wheels.items() if path is None]:
        raise UsageFault(f"torch_npu {', '.join(lacking)}: not in {vendor.cache()}; right form: {vendor.FETCH}")
    declared = {v: vendor.declared(vendor.member(path, vendor.LIBRARY)) for v, path in wheels.items() if path is not None}
    text = json.dumps(facts_of(declared).model_dump(), indent=1) + "\n"
    try:
        vendor.FACTS.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise UsageFault(f"{vendor.FACTS}: cannot be written: {fault.strerror}") from None
    click.echo(f"{vendor.FACTS.name}: written")


def run() -> int:
    """The commands with the suite's exit codes. What goes wrong is one line on stderr."""
    try:
        main(standalone_mode=False)
    except UsageFault as fault:
        click.echo(f"error: {fault}", err=True)
    except click.exceptions.NoArgsIsHelpError as fault:
        click.echo(fault.format_message(), err=True)
    except click.ClickException as fault:
        message = fault.format_message().rstrip(".")
        click.echo(f"error: {message}; right form: python -m conformance.npu.schemas --help", err=True)
    else:
        return 0
    return UsageFault.exit_code


if __name__ == "__main__":
    sys.exit(run())
