"""Known issues: faults of upstream that a run is expected to show, and the strictness that keeps the list true.

An entry holds for exactly the versions it names, and for one fault: what it `contains` is said by no other. One that no longer
fails, or fails in another way, differs; one that matches no check of a complete run is unused. Both fail the run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field, WithJsonSchema

from conformance.errors import UsageFault
from conformance.matrix import MATRIX, ROLES, ROOT, Id, Matrix, Role, Words
from conformance.results import Backend, Check, CheckRecord, Header, Precision, Route
from conformance.yamlsource import Document, Items, Strictly, form_error, load, nearest, validate

KNOWN_ISSUES = ROOT / "known_issues.yaml"
#: The one package whose version is a branch's name (see `stack.collect`), which no specifier fits.
_BY_BRANCH = "mindspeed"


def check_specifier(text: str, *at: str) -> str:
    """The text, if it is a PEP 440 specifier; `at` as in `form_error`."""
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise form_error(f"{text!r} is not a version specifier", "PEP 440, such as '>=0.9,<0.10'", *at) from None
    return text


def _check_link(text: str) -> str:
    if not re.match("https?://[^/]", text) or not text.isprintable() or " " in text:
        raise form_error(f"{text[:80]!r} is not a link", "https://...")
    return text


def _check_versions(versions: Mapping[str, str]) -> Mapping[str, str]:
    for package, wanted in versions.items():
        if canonicalize_name(package) != _BY_BRANCH:
            check_specifier(wanted, package)
        elif not re.fullmatch(r"[\w.][\w./+-]*", wanted):
            raise form_error(f"{wanted!r} is no branch", "MindSpeed's branch as headers name it, such as core_r0.16.0", package)
    return versions


class KnownIssue(Strictly):
    """One expected fault. Fields that are left out hold for all: roles, routes, precisions, versions.

    `versions` are PEP 440 specifiers by package; for `mindspeed` it is the exact name of the branch. `contains` pins the
    fault: an outcome, or the type of an exception, is what many faults share.
    """

    row: Id
    check: Check
    roles: Items[Role] = Field(ROLES, min_length=1)
    variant: Id = "documented"
    backend: Backend
    route: Route | None = None
    precision: Precision | None = None
    versions: Annotated[Mapping[str, str], AfterValidator(_check_versions)] = {}
    outcome: Literal["fail", "always_on", "no_effect", "refused", "crash", "unsupported"]
    exception: Words | None = Field(None, description="type of the exception")
    contains: Annotated[Words, Field(description="part of the exception's first line, or of the summary")]
    reason: Words
    link: Annotated[str, Field(max_length=500), AfterValidator(_check_link), WithJsonSchema({"type": "string", "format": "uri"})]

    def applies(self, header: Header) -> bool:
        """Whether the run has the backend, the route and all the versions that the entry holds for."""
        have = header.versions()
        return (
            self.backend == header.backend
            and self.route in (None, header.route)
            and all(_holds(canonicalize_name(package), have, wanted) for package, wanted in self.versions.items())
        )

    def covers(self, record: CheckRecord) -> bool:
        """Whether the entry speaks of this check, whatever its outcome."""
        return (
            (self.row, self.check, self.variant) == (record.row, record.check, record.variant)
            and record.role in self.roles
            and self.precision in (None, record.precision)
        )


def _holds(package: str, have: Mapping[str, str], wanted: str) -> bool:
    version = have.get(package)
    if package == _BY_BRANCH:
        return version == wanted
    try:
        return version is not None and SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:  # a checkout may call itself anything; then the entry does not apply
        return False


class KnownIssues(Strictly):
    """The whole file."""

    issues: Items[KnownIssue]


def load_known(path: Path = KNOWN_ISSUES, matrix: Matrix | None = None) -> tuple[KnownIssue, ...]:
    """Read and check the list; with a matrix, that rows and variants exist. UsageFault with file and line."""
    document = load(path)
    issues = validate(document, KnownIssues).issues
    if matrix is not None:
        for number, issue in enumerate(issues):
            _check_names(document, number, issue, matrix)
    return issues


def load_beside(matrix_file: Path, matrix: Matrix) -> tuple[KnownIssue, ...]:
    """The list in the directory of a matrix's file, as `load_known`. Only the suite's own matrix must have one."""
    path = matrix_file.with_name(KNOWN_ISSUES.name)
    return load_known(path, matrix) if matrix_file.resolve() == MATRIX or path.exists() else ()


def _check_names(document: Document, number: int, issue: KnownIssue, matrix: Matrix) -> None:
    ids = list(matrix.ids())
    if issue.row not in ids:
        raise document.fault(("issues", number, "row"), f"no such row; right form: {nearest(issue.row, ids)}")
    names = matrix[issue.row].variant_names
    if issue.variant not in names:
        right = nearest(issue.variant, names)
        raise document.fault(("issues", number, "variant"), f"no such variant; right form: {right}")


def require_one_each(entries: Iterable[KnownIssue], header: Header) -> None:
    """UsageFault when two entries hold for one check on this stack."""
    for one, other in itertools.combinations([entry for entry in entries if entry.applies(header)], 2):
        roles = [role for role in one.roles if role in other.roles]
        same = (one.row, one.check, one.variant) == (other.row, other.check, other.variant)
        if same and roles and (one.precision is None or other.precision in (None, one.precision)):
            where = f"{one.row}, {roles[0]}, {one.variant}, {one.check}"
            raise UsageFault(f"{KNOWN_ISSUES.name}: two entries hold for one check ({where}); right form: one")


def match(entries: Iterable[KnownIssue], record: CheckRecord, header: Header) -> KnownIssue | None:
    """The entry for this check on this stack, or None. That there is one at most: `require_one_each`."""
    return next((entry for entry in entries if entry.covers(record) and entry.applies(header)), None)


def judge(entry: KnownIssue, record: CheckRecord) -> str | None:
    """None when the check came out as the entry says, else how it differs."""
    if record.outcome == "pass":
        return f"expected {entry.outcome}, passes now: remove the known issue ({entry.link})"
    if record.outcome != entry.outcome:
        return f"expected {entry.outcome}, is {record.outcome}"
    raised = record.exception.type if record.exception else "no exception"
    if entry.exception and entry.exception != raised:
        return f"expected {entry.exception}, got {raised}"
    if entry.contains not in record.summary and entry.contains not in _message(record):
        return f"expected a message with {entry.contains!r}, got {_message(record) or record.summary!r}"
    return None


def _message(record: CheckRecord) -> str:
    return record.exception.message if record.exception else ""


def unused(entries: Iterable[KnownIssue], matched: Collection[KnownIssue], header: Header) -> tuple[KnownIssue, ...]:
    """Entries that hold for this stack and for a row of this complete run, and that no check matched."""
    return tuple(e for e in entries if e.row in header.rows and e.applies(header) and not any(e is m for m in matched))
