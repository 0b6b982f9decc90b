"""The support table as Markdown (GitHub's), without HTML, in English and in the form of the upstream Chinese page.

The same results and rows give the same text. Text from results is hostile until escaped: upstream messages hold pipes,
newlines, backticks and angle brackets, and tabulate escapes none of them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tabulate import tabulate

from conformance.matrix import ROLES, Role, Row, override_text
from conformance.report.words import OUTCOME_SIGNS, VERDICT_SIGNS, WORDS, Language, Words
from conformance.results import CHECKS, PRECISIONS, Check, CheckRecord, Header, ResultSet
from conformance.verdict import Conclusion, Verdict, conclude

#: Longest text in a cell and in a line of the details, in characters before escaping.
CELL, LINE = 160, 1000
#: Packages that a row's stack cell names; the stack table has them all.
_MAIN_PACKAGES = ("verl", "megatron-core", "mindspeed", "torch", "torch-npu")


def escape(text: str, limit: int = LINE) -> str:
    """Text that Markdown shows as it is, on one line, also in a table cell. What cannot be printed becomes a space."""
    printable = "".join(" " if unicodedata.category(c)[0] in "CZ" else c for c in text[: limit + 1])
    one_line = " ".join(printable.split())
    if len(text) > limit:
        one_line = one_line[:limit] + "…"
    escaped = re.sub(r"([\\`*\[\]<>|~&!#$])", r"\\\1", one_line)
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
    page = _Page(results, [row for row in rows if row.id in results.header.rows], WORDS[language], language)
    blocks = [*page.head(), *page.tables(), *page.legend(), *page.stack(), *page.details()]
    return "\n\n".join(blocks) + "\n"


class _Page:
    def __init__(self, results: ResultSet, rows: Sequence[Row], words: Words, language: Language) -> None:
        self.results = results
        self.rows = rows
        self.words = words
        self.language: Language = language
        self.conclusions = {(row.id, role): self._conclude(row, role) for row in rows for role in ROLES}

    def _conclude(self, row: Row, role: Role) -> Conclusion:
        mine = [r for r in self.results.checks if (r.row, r.role) == (row.id, role)]
        return conclude(row, mine, self.results.header.precisions)

    def _records(self, row: Row, role: Role, variant: str, check: Check) -> list[CheckRecord]:
        wanted = (row.id, role, variant, check)
        found = [r for r in self.results.checks if (r.row, r.role, r.variant, r.check) == wanted]
        return sorted(found, key=lambda r: PRECISIONS.index(r.precision) if r.precision else -1)

    def head(self) -> Iterator[str]:
        header, words = self.results.header, self.words
        yield f"# {words.title}"
        if not self.results.complete:
            yield f"**{words.incomplete}**"
        if not header.complete_selection:
            yield f"**{words.partial.format(rows=escape(', '.join(header.rows)))}**"
        yield words.started.format(
            started=escape(header.started),
            device=words.devices[header.device],
            backend=header.backend,
            precisions=", ".join(header.precisions),
        )

    def tables(self) -> Iterator[str]:
        for kind, title in self.words.tables.items():
            lines = [self._line(r, variant) for r in self.rows if r.table == kind for variant in r.variant_names]
            if lines:
                yield f"## {title}"
                yield table(self.words.columns, lines)

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
        ]

    def _keys(self, row: Row, variant: str) -> str:
        spelling = row.spelling(variant)
        keys = ", ".join(code(override_text(s.key, s.on, "plain")) for s in spelling.settings)
        companions = ", ".join(code(override_text(c.key, c.value, "plain")) for c in spelling.companions)
        return f"{keys}; {self.words.companions} {companions}" if companions else keys

    def _verdict(self, row: Row, role: Role, variant: str) -> str:
        conclusion = self.conclusions[(row.id, role)]
        if variant != "documented":
            return self._verdict_word(conclusion.by_variant[variant])
        by = f" ({conclusion.variant})" if conclusion.variant != "documented" else ""
        return self._verdict_word(conclusion.verdict) + by

    def _verdict_word(self, verdict: Verdict) -> str:
        return f"{VERDICT_SIGNS[verdict]} {self.words.verdicts[verdict][0]}"

    def _outcomes(self, row: Row, role: Role, variant: str, check: Check) -> str:
        records = self._records(row, role, variant, check)
        missing = f"{OUTCOME_SIGNS['not_run']} {self.words.outcomes['not_run']}"
        return " ".join(self._outcome(r) for r in records) or missing

    def _outcome(self, record: CheckRecord) -> str:
        text = f"{OUTCOME_SIGNS[record.outcome]} {self.words.outcomes[record.outcome]}"
        return f"{text} ({record.precision})" if record.precision else text

    def _evidence(self, row: Row, role: Role, variant: str) -> str:
        return " ".join(escape(r.summary, CELL) for r in self._records(row, role, variant, "engaged"))

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
            yield "\n".join(self._row_details(row))

    def _row_details(self, row: Row) -> Iterator[str]:
        for note in (row.note, *(row.spelling(name).note for name in row.variant_names)):
            if note:
                yield f"- {self.words.note}: {escape(note.zh if self.language == 'zh' else note.en)}"
        for variant in row.variant_names:
            for role in ROLES:
                name = self.words.documented if variant == "documented" else variant
                yield f"- {role}, {name}: {self._verdict_word(self.conclusions[(row.id, role)].by_variant[variant])}"
                for check in CHECKS:
                    for record in self._records(row, role, variant, check):
                        summary = f": {escape(record.summary)}" if record.summary else ""
                        yield f"  - {self.words.checks[check]} {self._outcome(record)}{summary}"
                        yield from (f"    - {line}" for line in self._record_details(record))

    def _record_details(self, record: CheckRecord) -> Iterator[str]:
        words, detail, raised = self.words, record.detail, record.exception
        forms = detail.get("forms")
        for form in forms if isinstance(forms, list) else []:
            if isinstance(form, dict):
                yield self._form(form)
        if raised:
            where = f"{escape(raised.frame)}, {escape(raised.owner)}"
            yield f"{words.exception}: {escape(raised.type)}: {escape(raised.message)} ({where})"
        figures = detail.get("figures")
        if isinstance(figures, dict) and figures:
            yield f"{words.figures}: " + ", ".join(f"{escape(k)} = {escape(_figure(v))}" for k, v in figures.items())
        evidence = detail.get("evidence")
        for line in evidence if isinstance(evidence, list) else []:
            yield f"{words.evidence}: {escape(str(line))}"
        how = detail.get("how_to_run")
        if isinstance(how, str) and how:
            yield f"{words.how_to_run}: {code(how)}"

    def _form(self, form: Mapping[str, object]) -> str:
        """One way to write the overrides: what works, ready to copy; else what it comes to."""
        name, outcome, overrides = form.get("form"), form.get("outcome"), form.get("overrides")
        if outcome == "pass" and isinstance(overrides, list):
            return f"{self.words.overrides} ({escape(str(name))}): " + " ".join(code(str(o)) for o in overrides)
        known = next((f"{sign} {self.words.outcomes[o]}" for o, sign in OUTCOME_SIGNS.items() if o == outcome), None)
        return f"{escape(str(name))}: {known or escape(str(outcome))}: {escape(str(form.get('summary', '')))}"


def _by_role(texts: dict[Role, str]) -> str:
    return ", ".join(f"{role} {text}" for role, text in texts.items() if text)


def _stack_cell(header: Header) -> str:
    versions = header.versions()
    return escape(", ".join(f"{name} {versions[name]}" for name in _MAIN_PACKAGES if name in versions), CELL)


def _figure(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
