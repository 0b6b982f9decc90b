"""The support table as Markdown (GitHub's), without HTML, in English and in the form of the upstream Chinese page.

The same results and rows give the same text. Text from results is hostile until escaped: upstream messages hold pipes,
newlines, backticks and angle brackets, and tabulate escapes none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from tabulate import tabulate

from conformance.matrix import ROLES, Role, Row, override_text
from conformance.operators import Family
from conformance.report.sentences import said
from conformance.report.text import one_line
from conformance.report.view import Form, View, detail_of, run_sentence
from conformance.report.words import OUTCOME_SIGNS, VERDICT_SIGNS, WORDS, Language, Words
from conformance.results import CHECKS, Check, CheckRecord, Header, OperatorRecord, Outcome, ResultSet
from conformance.verdict import Verdict

#: Longest text in a cell and in a line of the details, in characters before escaping.
CELL, LINE = 160, 1000
#: Packages that a row's stack cell names; the stack table has them all.
_MAIN_PACKAGES = ("verl", "megatron-core", "mindspeed", "torch", "torch-npu")


def escape(text: str, limit: int = LINE) -> str:
    """Text that Markdown shows as it is, on one line, also in a table cell. What cannot be printed becomes a space."""
    escaped = re.sub(r"([\\`*\[\]<>|~&!#$])", r"\\\1", one_line(text, limit))
    # Inside a word an underscore is plain; elsewhere it starts or ends emphasis.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped)


def code(text: str) -> str:
    """A code span, or escaped text where a code span could not hold it: there is no escaping inside one."""
    fits = text.isprintable() and text == text.strip() and text and not set(text) & set("`|\\") and len(text) <= LINE
    return f"`{text}`" if fits else escape(text)


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A GitHub table of cells that are Markdown already (see `escape`).

    Without tabulate's padding: with it one changed cell would move every line, and the width of Chinese text would
    depend on whether wcwidth is installed.
    """
    rows = [list(line) for line in lines]
    head, rule, *body = tabulate(rows, headers=list(columns), tablefmt="github", disable_numparse=True).split("\n")
    # Every pipe within a cell has a backslash in front, so spaces in front of a pipe are padding.
    return "\n".join(re.sub(" {2,}[|]", " |", line) for line in [head, re.sub("-{3,}", "---", rule), *body])


def render(results: ResultSet, rows: Sequence[Row], language: Language) -> str:
    """The whole page. `rows` is the matrix; those that the run selected are shown, in the matrix's order."""
    page = _Page(View(results, rows), WORDS[language], language)
    blocks = [*page.head(), *page.tables(), *page.legend(), *page.stack(), *page.details()]
    return "\n\n".join(blocks) + "\n"


def row_details(view: View, row: Row, language: Language) -> str:
    """One row's checks with what stands behind them, as a nested list."""
    return "\n".join(_Page(view, WORDS[language], language).row_details(row))


class _Page:
    def __init__(self, view: View, words: Words, language: Language) -> None:
        self.view = view
        self.results = view.results
        self.rows = view.rows
        self.words = words
        self.language: Language = language

    def head(self) -> Iterator[str]:
        header, words = self.results.header, self.words
        yield f"# {words.title}"
        if not self.results.complete:
            yield f"**{words.incomplete}**"
        if not header.complete_selection:
            yield f"**{words.partial.format(rows=escape(', '.join(header.rows)))}**"
        yield escape(run_sentence(header, words))
        notes = [(words.untested, line) for line in header.untested] + [(words.deviation, line) for line in header.deviations]
        if notes:
            yield "\n".join(f"- **{word}**: {self._said(line)}" for word, line in notes)

    def tables(self) -> Iterator[str]:
        for kind, title in self.words.tables.items():
            lines = [self._line(r, variant) for r in self.rows if r.table == kind for variant in r.variant_names]
            if lines:
                yield f"## {title}"
                extra = [self.words.operators] if any(r.operators for r in self.rows if r.table == kind) else []
                yield table([*self.words.columns, *extra], [line[: len(self.words.columns) + len(extra)] for line in lines])

    def _line(self, row: Row, variant: str) -> list[str]:
        """The documented spelling has the row's own verdict; a variant has what it came to by itself."""
        documented = variant == "documented"
        return [
            escape(row.name) if documented else f"↳ {escape(row.name)} ({variant})",
            self._keys(row, variant),
            row.status,
            _by_role({role: self._verdict(row, role, variant) for role in ROLES}),
            *(_by_role({role: self._outcomes(row, role, variant, check) for role in ROLES}) for check in CHECKS),
            _by_role({role: self._evidence(row, role, variant) for role in ROLES}),
            self.words.devices[self.results.header.device],
            _stack_cell(self.results.header),
            "; ".join(self._operator(*found) for found in self.view.operators(row)) if documented else "",
        ]

    def _operator(self, family: Family, record: OperatorRecord | None) -> str:
        """What a family of operators came to under generated inputs."""
        if record is None or record.outcome != "pass":
            outcome: Outcome = "not_run" if record is None else record.outcome
            said = "" if record is None else f": {self._said(record.summary, CELL)}"
            return f"{code(family)} {OUTCOME_SIGNS[outcome]} {self.words.outcomes[outcome]}{said}"
        ratio = "?" if record.worst_ratio is None else f"{record.worst_ratio:.2g}×"
        told = self.words.operator_cell.format(cases=record.cases, ratio=ratio, device=self.words.devices[record.device])
        return f"{code(family)} {OUTCOME_SIGNS['pass']} {told}"

    def _keys(self, row: Row, variant: str) -> str:
        spelling = row.spelling(variant)
        keys = ", ".join(code(override_text(s.key, s.on, "plain")) for s in spelling.settings)
        companions = ", ".join(code(override_text(c.key, c.value, "plain")) for c in spelling.companions)
        return f"{keys}; {self.words.companions} {companions}" if companions else keys

    def _verdict(self, row: Row, role: Role, variant: str) -> str:
        conclusion = self.view.conclusion(row, role)
        if variant == "documented" and conclusion.variant != "documented":
            return f"{self._verdict_word(conclusion.verdict)} ({conclusion.variant})"
        owner = conclusion.owners.get(variant)
        return self._verdict_word(conclusion.by_variant[variant]) + (f": {escape(owner)}" if owner else "")

    def _verdict_word(self, verdict: Verdict) -> str:
        return f"{VERDICT_SIGNS[verdict]} {self.words.verdicts[verdict][0]}"

    def _outcomes(self, row: Row, role: Role, variant: str, check: Check) -> str:
        records = self.view.records(row, role, variant, check)
        missing = f"{OUTCOME_SIGNS['not_run']} {self.words.outcomes['not_run']}"
        return " ".join(self._outcome(r) for r in records) or missing

    def _outcome(self, record: CheckRecord) -> str:
        text = f"{OUTCOME_SIGNS[record.outcome]} {self.words.outcomes[record.outcome]}"
        return f"{text} ({record.precision})" if record.precision else text

    def _evidence(self, row: Row, role: Role, variant: str) -> str:
        return " ".join(self._said(r.summary, CELL) for r in self.view.records(row, role, variant, "engaged"))

    def legend(self) -> Iterator[str]:
        yield f"## {self.words.legend}"
        yield "\n".join(f"- {self._verdict_word(v)}: {self.words.verdicts[v][1]}" for v in Verdict)

    def stack(self) -> Iterator[str]:
        yield f"## {self.words.stack}"
        # The paths stay in the results: a page is read on other machines.
        lines = [[escape(p.name), escape(p.version), code(p.commit or "")] for p in self.results.header.stack]
        yield table(self.words.stack_columns, lines)

    def details(self) -> Iterator[str]:
        yield f"## {self.words.details}"
        for row in self.rows:
            title = row.title.zh if self.language == "zh" else row.title.en
            yield f"### {code(row.id)} {escape(row.name)}: {escape(title)}"
            yield "\n".join([*self._notes(row), *self.row_details(row)])

    def _notes(self, row: Row) -> Iterator[str]:
        for note in (row.note, *(row.spelling(name).note for name in row.variant_names)):
            if note:
                yield f"- {self.words.note}: {escape(note.zh if self.language == 'zh' else note.en)}"

    def row_details(self, row: Row) -> Iterator[str]:
        for variant in row.variant_names:
            for role in ROLES:
                name = self.words.documented if variant == "documented" else variant
                yield f"- {role}, {name}: {self._verdict_word(self.view.conclusion(row, role).by_variant[variant])}"
                for check in CHECKS:
                    for record in self.view.records(row, role, variant, check):
                        summary = f": {self._said(record.summary)}" if record.summary else ""
                        yield f"  - {self.words.checks[check]} {self._outcome(record)}{summary}"
                        yield from (f"    - {line}" for line in self._record_details(record))

    def _record_details(self, record: CheckRecord) -> Iterator[str]:
        words, detail, raised = self.words, detail_of(record), record.exception
        yield from (self._form(form) for form in detail.forms)
        if raised:
            where = f"{self._said(raised.frame)}, {escape(raised.owner)}"
            yield f"{words.exception}: {escape(raised.type)}: {escape(raised.message)} ({where})"
        if detail.with_plain:
            yield f"{words.with_plain}: {self._said(detail.with_plain)}"
        if detail.figures:
            yield f"{words.figures}: " + ", ".join(f"{self._said(k)} = {self._said(v)}" for k, v in detail.figures)
        yield from (f"{words.evidence}: {self._said(line)}" for line in detail.evidence)
        if detail.how_to_run:
            yield f"{words.how_to_run}: {code(detail.how_to_run)}"

    def _form(self, form: Form) -> str:
        """One way to write the overrides: what works, ready to copy; else what it comes to."""
        if form.works:
            return f"{self.words.overrides} ({self._said(form.name)}): " + " ".join(code(o) for o in form.overrides)
        known = f"{OUTCOME_SIGNS[form.outcome]} {self.words.outcomes[form.outcome]}" if form.outcome else escape(form.word)
        return f"{self._said(form.name)}: {known}: {self._said(form.summary)}"

    def _said(self, text: str, limit: int = LINE) -> str:
        """A text of the results, escaped: the suite's own sentences in the page's language, upstream's as they are."""
        return escape(said(text, self.language), limit)


def _by_role(texts: dict[Role, str]) -> str:
    return ", ".join(f"{role} {text}" for role, text in texts.items() if text)


def _stack_cell(header: Header) -> str:
    versions = header.versions()
    return escape(", ".join(f"{name} {versions[name]}" for name in _MAIN_PACKAGES if name in versions), CELL)
