"""`conformance`, or `python -m conformance`: what the suite knows without running the stack.

\b
Exit codes: 0 all as expected, 1 a verdict differs, 2 usage or environment,
3 an error of this suite, 4 interrupted.
"""

from __future__ import annotations

import datetime
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import click

from conformance import combinations, docs, gate, promote
from conformance.checkout import mindspeed_for
from conformance.ci import badge
from conformance.diff import compare, read_whole
from conformance.errors import ConformanceError, UsageFault
from conformance.explain import explanation
from conformance.known import load_beside
from conformance.matrix import MATRIX, ROOT, load_matrix
from conformance.report.difference import to_json, to_markdown, to_terminal
from conformance.report.history import read_runs
from conformance.report.page import render_page
from conformance.report.short import insert, short_table
from conformance.report.text import one_line
from conformance.report.upgrade import BEGIN, END, upgrade_table
from conformance.results import read_results
from conformance.stack import find_mindspeed, require
from conformance.stackfile import names as stack_names
from conformance.stackfile import read_stack, require_stack

PATH = click.Path(path_type=Path)
INTERRUPTED = 4


@click.group(help=__doc__)
@click.option("--matrix", type=PATH, help="the rows that the results are of, if not those of matrix.yaml")
@click.pass_context
def main(context: click.Context, matrix: Path | None) -> None:
    """The command group."""
    context.obj = matrix


def _matrix_file() -> Path:
    return click.get_current_context().obj or MATRIX


@main.command()
@click.argument("results", type=click.Path(path_type=Path))
@click.option("--into", type=click.Path(path_type=Path), help="Markdown file with a place for the table (see README.md)")
def table(results: Path, into: Path | None) -> None:
    """The short support table of a result set; with --into, written into a Markdown file."""
    text = short_table(read_results(results), load_matrix(_matrix_file()).rows)
    if into is None:
        click.echo(text)
    else:
        insert(into, text)


@main.command()
@click.argument("row")
def explain(row: str) -> None:
    """How to write a row's overrides, for actor and for ref, ready to paste."""
    matrix = load_matrix(_matrix_file())
    if row not in set(matrix.ids()):
        raise UsageFault(f"{row}: no such row; right form: one of {', '.join(matrix.ids())}")
    click.echo("\n".join(explanation(matrix[row])))


@main.command()
@click.argument("old", type=PATH)
@click.argument("new", type=PATH)
@click.option("--format", "form", type=click.Choice(["terminal", "markdown", "json"]), default="terminal", show_default=True)
@click.option("--into", type=PATH, help="Markdown file with a place for the changed verdicts, key by key (see README.md)")
def diff(old: Path, new: Path, form: str, into: Path | None) -> None:
    """What changed from the result set OLD to NEW, and which packages moved. Always exits 0: `gate` judges."""
    sides, rows = (read_whole(old), read_whole(new)), load_matrix(_matrix_file()).rows
    if into is not None:
        insert(into, upgrade_table(*sides, rows), (BEGIN, END))
        return
    renderers = {"terminal": to_terminal, "markdown": to_markdown, "json": to_json}
    click.echo(renderers[form](compare(*sides, rows)))


@main.command(name="gate")
@click.argument("new", type=PATH)
@click.option("--against", "old", type=PATH, required=True, help="the result set to compare with")
@click.option("--policy", type=PATH, help="TOML: which rows must work, what is waived until when (policy.schema.json)")
def gate_command(new: Path, old: Path, policy: Path | None) -> int:
    """Exit 1 if the result set NEW is worse than the other one, or than the policy asks for."""
    matrix = load_matrix(_matrix_file())
    rules = gate.load_policy(policy, matrix) if policy else gate.Policy()
    results = read_whole(new)
    difference = compare(read_whole(old), results, matrix.rows)
    judgement = gate.judge(difference, results, matrix.rows, rules, _now().date())
    click.echo("\n".join(one_line(line) for line in (*difference.notes, *gate.lines(judgement))))
    return 1 if judgement.red else 0


@main.command(name="promote")
@click.argument("results", type=PATH, nargs=-1, required=True)
@click.option("--policy", type=PATH, help="the gate's policy: no row with an open waiver is Released")
@click.option("--max-age", type=click.IntRange(1, 3650), default=90, show_default=True, help="days that a run counts")
@click.option("--write", is_flag=True, help="edit matrix.yaml; without it nothing is written")
def promote_command(results: tuple[Path, ...], policy: Path | None, max_age: int, write: bool) -> None:
    """Which rows may move up from Dev to Preview to Released, and what holds back the others."""
    matrix = load_matrix(_matrix_file())
    rules = gate.load_policy(policy, matrix) if policy else None
    evidence = promote.read_evidence(results, _matrix_file(), _now(), max_age)
    proposals = promote.propose(matrix.rows, evidence, rules, _now().date())
    click.echo("\n".join(promote.lines(evidence, proposals)))
    if write:
        click.echo(f"{promote.write(_matrix_file(), proposals)} rows of {_matrix_file().name} were edited")


@main.command(name="stack")
def stack_command() -> None:
    """What is installed, from where, whether it is a documented combination, and what to change if not."""
    mindspeed = find_mindspeed()
    found = combinations.installed(mindspeed)
    click.echo("\n".join(combinations.lines(found, combinations.load_combinations(), mindspeed)))
    require()


@main.command(name="badge")
@click.argument("results", type=PATH)
def badge_command(results: Path) -> None:
    """A badge's JSON (shields.io endpoint) of a result set that has all rows."""
    matrix = load_matrix(_matrix_file())
    click.echo(json.dumps(badge(read_whole(results), matrix.rows, load_beside(_matrix_file(), matrix))))


@main.command(name="page")
@click.argument("results", type=PATH, nargs=-1, required=True)
@click.option("--history", type=PATH, help="a directory of runs, e.g. reports/runs: they are in the history too")
@click.option("--out", type=PATH, required=True, help="the HTML file to write")
def page_command(results: tuple[Path, ...], history: Path | None, out: Path) -> None:
    """One HTML file that needs no network: the last of RESULTS, with the history of each check over all of them."""
    runs = read_runs(results, history)
    out.write_text(render_page(runs[-1], runs, load_matrix(_matrix_file()).rows), encoding="utf-8")


@main.command(name="run", context_settings={"ignore_unknown_options": True})
@click.option("--stack", "name", required=True, help="a file under stacks/, without .txt")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run_command(name: str, arguments: tuple[str, ...]) -> int:
    """`pytest conformance ARGUMENTS` with the MindSpeed of a stack. The exit code is pytest's."""
    if name not in stack_names():
        raise UsageFault(f"--stack {name}: no such stack; right form: one of {', '.join(stack_names())}")
    stack = read_stack(name)
    require_stack(stack)
    found = mindspeed_for(stack, ROOT / ".tox" / "mindspeed")
    click.echo(found.said, err=True)
    environment = {k: v for k, v in os.environ.items() if k != "MINDSPEED_HOME"}
    if found.home is not None:
        environment["MINDSPEED_HOME"] = str(found.home)
    command = [sys.executable, "-m", "pytest", str(ROOT / "conformance"), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


@main.command(name="docs")
@click.option("--check", is_flag=True, help="write nothing; exit 1 and name the pages that differ")
def docs_command(check: bool) -> int:
    """Write the generated pages of docs/ from the matrix, the results in reports/, known_issues.yaml and the code."""
    pages = docs.pages()
    changed = docs.differing(docs.DOCS, pages) if check else docs.write(docs.DOCS, pages)
    for name in changed:
        click.echo(f"docs/{name}: " + ("not as generated; right form: python -m conformance docs" if check else "written"))
    return 1 if check and changed else 0


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def run(command: click.Command = main, name: str = "conformance") -> int:
    """A command, by default all of them, with the suite's exit codes. What goes wrong is one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 is no error
    try:
        # Not main.main, which ends a closed pipe in exit code 1.
        with command.make_context(name, sys.argv[1:]) as context:
            code = command.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as done:  # --help
        return done.exit_code
    except ConformanceError as fault:
        return _fault(str(fault), fault.exit_code)
    except click.exceptions.NoArgsIsHelpError as fault:
        click.echo(fault.format_message(), err=True)
        return UsageFault.exit_code
    except click.ClickException as fault:
        at = fault.ctx if isinstance(fault, click.UsageError) else None
        right = f"; right form: {at.command_path} --help" if at else ""
        return _fault(f"{fault.format_message().rstrip('.')}{right}", UsageFault.exit_code)
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except (click.Abort, KeyboardInterrupt):
        return _fault("interrupted", INTERRUPTED)
    except OSError as fault:
        return _fault(f"{fault.filename or 'output'}: {fault.strerror}", UsageFault.exit_code)
    except Exception as fault:
        frame = traceback.extract_tb(fault.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        return _fault(f"of this suite: {type(fault).__name__}: {fault} ({where})", ConformanceError.exit_code)
    return code if isinstance(code, int) else 0


def _fault(text: str, code: int) -> int:
    click.echo(f"error: {one_line(text)}", err=True)
    return code


if __name__ == "__main__":
    sys.exit(run())
