"""What was found, a line for each question: claim, verdict, effect with interval, scope, and a link to its table.

A question's words stand in `NAME.toml` beside its file in `ablations/`, which must not change after the declaration.
They hold no result: numbers are filled in from the table.
"""

import json
import lzma
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from lit_lazy.support.console import format_duration
from lit_lazy.support.error_messages import describe_exception
from lit_lazy.support.names_to_paths import PROJECT
from lit_lazy.support.stored_records import make_record
from lit_lazy.table.build import TABLE, read_table
from lit_lazy.table.column_statistics import Measure
from lit_lazy.table.columns import Column
from lit_lazy.table.declaration import Declaration, Verdict
from lit_lazy.table.document_formats import Block, Heading, Paragraph, escape_markdown, to_markdown
from lit_lazy.table.finding_text import format_seeds
from lit_lazy.table.render import build_finding, choose_columns, format_effect, format_estimate
from lit_lazy.table.results_table import Table
from lit_lazy.table.verdict import describe_bounds, format_finding, format_interval

T = TypeVar("T")
SUBJECTS = (
    "Compute-optimal models",
    "The sink",
    "Sparsity",
    "Loss on text",
    "Bias and positions",
    "Length and streaming",
    "The threshold",
    "A trained model",
    "Cost",
    "Other",
)
"""The order of the table of all verdicts."""
THEMES = ("Loss", "Extrapolation", "Sparsity", "Sink", "Adaptation", "Cost")
"""The order of the table of findings."""


class QuestionResult(NamedTuple):
    """The table of a question and its folder."""

    folder: Path
    table: Table

    @property
    def declared(self) -> Declaration:
        assert self.table.declaration is not None
        return self.table.declaration


@dataclass(frozen=True)
class Words:
    """How a question is listed; by default by its declaration alone.

    `effect` may name rows and contrasts, `{row: softmax}` and `{contrast: elastic - softmax}`, whose mean and interval
    are filled in; without it all contrasts are shown.
    """

    subject: str = "Other"
    claim: str = ""
    effect: str = ""
    scope: str = ""
    finding: str = ""
    """The theme under which it is one of the README's findings."""
    about: str = ""
    """Reviewers' questions that the declaration did not name."""

    def __post_init__(self) -> None:
        for name, value, known in (("subject", self.subject, SUBJECTS), ("finding", self.finding, ("", *THEMES))):
            if value not in known:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(filter(None, known))}")


class Answer(NamedTuple):
    """A line of a table of verdicts: its words with claim, effect and scope filled in."""

    question: str
    words: Words
    status: str
    source: str
    """The reviewers' questions that it bears on."""
    page: str
    """Its page, in the folder of all results."""


def read_words(question: str) -> Words:
    """The words of a question, of the working directory's `ablations/` or the project's.

    Raises a one-line ValueError if the file is damaged.
    """
    path = find_words(question)
    if path is None:
        return Words()
    try:
        return Words(**tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: has no words of a question ({describe_exception(error)})") from None


def find_words(name: str) -> Path | None:
    paths = (root / "ablations" / f"{name}.toml" for root in (Path.cwd(), PROJECT))
    return next((path for path in paths if path.is_file()), None)


def collect_answers(found: Sequence[QuestionResult], folder: Path) -> list[Answer]:
    """The answers of all questions below a folder that no later one repeats, by subject.

    Raises a one-line ValueError if words name a row or contrast that the table lacks.
    """
    repeated = {result.declared.after for result in found}
    answers = [_answer(result, folder) for result in found] + _read_first_round(folder)
    kept = [answer for answer in answers if answer.question not in repeated]
    return sorted(kept, key=lambda answer: SUBJECTS.index(answer.words.subject))


def _answer(result: QuestionResult, folder: Path) -> Answer:
    table, declared, verdict = result.table, result.declared, result.table.verdict
    words, status, effect = read_words(table.ablation), "not decided yet", ""
    claim, scope = words.claim or declared.claim, words.scope or table.base
    if verdict is not None:
        status, effect = verdict.status, _format_effect(words, table, declared, verdict)
        scope += f", {verdict.n} seeds"
    status += " (exploratory)" if declared.exploratory else ""
    source = ", ".join(filter(None, (declared.source, words.about)))
    page = os.path.relpath(result.folder / "table.md", folder)
    return Answer(table.ablation, replace(words, claim=claim, effect=effect, scope=scope), status, source, page)


def _format_effect(words: Words, table: Table, declared: Declaration, verdict: Verdict) -> str:
    column = table.columns_by_key[declared.primary]
    effect = words.effect or ", ".join(f"{part.name}: {{contrast: {part.name}}}" for part in verdict.parts)
    measures = table.measures[declared.primary]
    rows = {f"row: {name}": _format_value(measure, column) for name, measure in measures.items()}
    contrasts = {f"contrast: {part.name}": format_finding(declared, part, column) for part in verdict.parts}
    return _fill(effect, rows | contrasts, table.ablation)


def _format_value(measure: Measure, column: Column) -> str:
    return f"{format_estimate(measure, column)} {column.unit}".rstrip()


def _fill(effect: str, known: Mapping[str, str], question: str) -> str:
    where = f"{question}.toml: effect"
    return re.sub(r"\{((?:row|contrast): [^{}]+)\}", lambda match: _look_up(known, match[1], where), effect)


def _look_up(known: Mapping[str, T], name: str, where: str) -> T:
    if name not in known:
        raise ValueError(f"{where}: the table has no {name!r}; it has {', '.join(known)}")
    return known[name]


def _read_first_round(folder: Path) -> list[Answer]:
    """The questions of the first round that were not asked again, from its record."""
    path = folder / "first-round.json.xz"
    if not path.exists():
        return []
    recorded = json.loads(lzma.decompress(path.read_bytes()))["questions"]
    return [_recall(name, record) for name, record in recorded.items() if "listed" in record]


def _recall(name: str, record: Mapping[str, Any]) -> Answer:
    words = Words(**record["listed"])
    (column,) = (make_record(Column, one) for one in record["columns"] if one["key"] == record["primary"])
    number, unit = partial(column.format, sign="+"), column.difference_unit
    contrasts = {
        f"contrast: {part['name']}": f"{format_interval(part['mean'], part['low'], part['high'], number)} {unit}"
        for part in record["contrasts"]
    }
    effect, scope = _fill(words.effect, contrasts, name).rstrip(), f"{words.scope}, {record['n']} seeds"
    words = replace(words, effect=effect, scope=scope)
    return Answer(name, words, record["status"], record["source"], f"first-round.md#{name}")


def fill_page(text: str, answers: Sequence[Answer], folder: Path, place: Path) -> str:
    """The text of a page with all that is generated in it made anew.

    That is the tables between markers, of all verdicts, of the README's findings and of the reviewers' questions, and
    every number whose link names its row and column: `[0.1](FOLDER/table.md "softmax: first-key weight")`; `Δ ` before
    the column is the difference to the baseline, and table.json has the columns that table.md does not show. folder:
    that of all results. place: that of the page. Raises a one-line ValueError if there is nothing to fill, or a link
    names what its table lacks.
    """
    results = os.path.relpath(folder, place)
    make_table = {
        "verdicts": partial(_format_answers, [(answer.words.subject, answer) for answer in answers], results),
        "findings": partial(
            _format_answers,
            [(theme, answer) for theme in THEMES for answer in answers if answer.words.finding == theme],
            results,
        ),
        "reviewers": partial(_format_reviewers, answers, results),
    }
    filled, tables = _MARKED.subn(lambda match: f"{match[1]}{make_table[match[2]]()}{match[3]}", text)
    read = cache(read_table)
    filled, quotes = _QUOTED.subn(
        lambda match: f"[{_quote_cell(read(place / match[2] / TABLE), match[3], match[4])}]{match[1]}", filled
    )
    if not tables + quotes:
        raise ValueError(
            f"--insert: the file lacks <!-- {' -->, <!-- '.join(make_table)} -->, and <!-- end --> after it"
        )
    return filled


_MARKED = re.compile(r"(<!-- (findings|verdicts|reviewers) -->\n)(?:.*\n)*?(<!-- end -->)")
_QUOTED = re.compile(r'\[(?:\\.|[^]\\])*\](\((\S+)/table\.(md|json) "([^"]+)"\))')


def _quote_cell(table: Table, ending: str, place: str) -> str:
    """A row's value in a column, `softmax: loss`, or its difference to the baseline, `lazy: Δ loss`.

    ending: that of the file that shows it.
    """
    variant, _, title = place.rpartition(": ")
    column = _look_up({column.title: column for column in table.columns}, title.removeprefix("Δ "), table.ablation)
    if ending == "md" and column not in choose_columns(table)[title.startswith("Δ ")]:
        raise ValueError(f"{table.ablation}: table.md does not show {title!r}; link its table.json")
    measure = _look_up(table.measures[column.key], variant, table.ablation)
    if title.startswith("Δ "):
        return escape_markdown(format_effect(measure.difference, column, table.is_void(variant, column.key)))
    return escape_markdown(_format_value(measure, column))


def _format_answers(lines: Sequence[tuple[str, Answer]], results: str) -> str:
    rows = []
    for title, answer in lines:
        claim, effect, scope = map(escape_markdown, (answer.words.claim, answer.words.effect, answer.words.scope))
        rows.append((title, claim, _link(answer.status, answer, results), effect, scope))
    return _format_table(("", "Claim", "Verdict", "Effect [interval]", "Scope"), rows)


def _format_reviewers(answers: Sequence[Answer], results: str) -> str:
    """The reviewers' questions with the verdicts on a part of each; ablations/reviewers.toml has the questions."""
    path = find_words("reviewers")
    asked = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    verdicts: dict[str, list[str]] = {number: [] for number in asked}
    for answer in answers:
        for number in re.findall(r"\bR\d+\b", answer.source):
            verdicts.setdefault(number, []).append(f"{_link(answer.question, answer, results)}: {answer.status}")
    rows = [
        (n, escape_markdown(one["asked"]), "; ".join(verdicts[n]) or "–", escape_markdown(one["open"]))
        for n, one in asked.items()
    ]
    return _format_table(("", "Question", "Verdicts on a part of it", "Still open"), rows)


def _link(text: str, answer: Answer, results: str) -> str:
    return f"[{text}]({quote(os.path.normpath(os.path.join(results, answer.page)), safe='/#')})"


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ("---",) * len(header), *rows))


def read_questions(folder: Path) -> list[QuestionResult]:
    """The tables of all questions below a folder, by name.

    Raises a one-line ValueError if a table cannot be read.
    """
    found = (QuestionResult(path.parent, read_table(path)) for path in sorted(folder.glob(f"*/{TABLE}")))
    return [result for result in found if result.table.declaration is not None]


def format_summary(found: Iterable[QuestionResult]) -> str:
    """Each verdict with its contrasts, seeds, commits and command, for a terminal."""
    return to_markdown([block for result in found for block in _build_blocks(result)])


def _build_blocks(result: QuestionResult) -> list[Block]:
    table = result.table
    declared = result.declared
    blocks = [Heading(f"{table.ablation} on {table.base}", 2), *build_finding(table)]
    if table.verdict is None:
        return blocks
    column = table.columns_by_key[declared.primary]
    spent = "" if table.seconds is None else f" Training and evaluation: {format_duration(table.seconds)}."
    rule = ", ".join([declared.rule, *describe_bounds(declared, column)])
    where = f"in {declared.commit}" if declared.commit else "and not committed before its run"
    about = (
        f"Primary outcome: {column.title}. Rule: {rule}. Seeds: {format_seeds(declared.seeds, 6)}. "
        f"Declared {where} (digest {declared.digest}), run at {table.git_sha}.{spent} "
        f"Folder: {result.folder}. Made by: {table.command}"
    )
    return [*blocks, Paragraph(about)]
