"""The documentation's page on what the runs found upstream: each fault of the list of known issues once, with where it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from conformance.known import KnownIssue
from conformance.matrix import Row
from conformance.report.markdown import code, escape, table
from conformance.report.row_page import WRITTEN, target

_ABOUT = """\
The faults of upstream that a run is expected to show, from `known_issues.yaml`, each once. How each row comes out, and which
spelling works instead, is on [the row's page](rows/index.md). The other versions of a stack are in `stacks/`. What was found
beside the rows is among [the other findings](other-findings.md)."""
_COLUMNS = ["fault", "rows", "seen with", "what it says", "where"]


def upstream_page(rows: Sequence[Row], known: Sequence[KnownIssue]) -> str:
    """The whole page: one line for each reason, in the order of the list."""
    faults: dict[str, list[KnownIssue]] = {}
    for issue in known:
        faults.setdefault(issue.reason, []).append(issue)
    names = {row.id: f"[{escape(row.name)}](rows/{row.id}.md)" for row in rows}
    lines = [
        [
            escape(reason),
            _each(names[issue.row] for issue in issues),
            _each(_stack(issue) for issue in issues),
            _each(code(issue.contains) for issue in issues),
            _each(_link(issue.link) for issue in issues),
        ]
        for reason, issues in faults.items()
    ]
    return "\n\n".join([WRITTEN, "# What the runs found upstream", _ABOUT, table(_COLUMNS, lines)]) + "\n"


def _each(cells: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(cells))


def _stack(issue: KnownIssue) -> str:
    """The release of verl says which stack it is; where an entry holds for any, all that it names."""
    named = {package: wanted for package, wanted in issue.versions.items() if package == "verl"} or issue.versions
    versions = [f"{package} {wanted.removeprefix('==')}" for package, wanted in named.items()]
    without = ["without MindSpeed"] if issue.backend == "plain" else []
    return escape(", ".join([*versions, *([issue.route] if issue.route else []), *without]))


def _link(link: str) -> str:
    """Named by the repository and the thread's number, or the file and the line."""
    parts = urlsplit(link)
    path = parts.path.strip("/").split("/")
    return f"[{escape(' '.join([path[1], path[-1], parts.fragment]).strip() if len(path) > 1 else link)}]({target(link)})"
