"""The verdicts of questions, from their tables: for a terminal, and as docs/questions.md."""

import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from lit_lazy.report.findings import Answer, QuestionResult, collect_answers, find_words
from lit_lazy.support.console import format_duration
from lit_lazy.table.document import Block, BulletList, Heading, Paragraph, Tabular, to_markdown
from lit_lazy.table.finding_text import describe_unlearned
from lit_lazy.table.looks import ALPHA
from lit_lazy.table.stored import TABLE, read_table
from lit_lazy.table.verdicts import (
    describe_bounds,
    describe_contrasts,
    describe_earlier,
    describe_looks,
    describe_missing,
)

PAGE_WIDTH = 1000
"""Maximum width of a page's tables in characters: large, so that they are not split."""


def read_questions(folder: Path) -> list[QuestionResult]:
    """The tables of all questions below a folder, by name.

    Raises a one-line ValueError if a table cannot be read.
    """
    found = (QuestionResult(path.parent, read_table(path)) for path in sorted(folder.glob(f"*/{TABLE}")))
    return [result for result in found if result.table.declaration is not None]


def format_summary(found: Iterable[QuestionResult]) -> str:
    """Each verdict with its contrasts, seeds, commits and command, for a terminal."""
    return to_markdown([block for result in found for block in _build_blocks(result)])


def format_page(found: Sequence[QuestionResult], folder: Path, place: Path) -> str:
    """The page docs/questions.md. folder: that of all results. place: that of the page."""
    opening: list[Block] = [
        Heading("Questions", 1),
        Paragraph(_SUBJECT),
        Paragraph(_PROCEDURE),
        BulletList(_VERDICTS),
        Paragraph(_SCOPE),
        Heading("Questions of the reviewers", 2),
        _build_reviewer_table(collect_answers(found, folder)),
    ]
    parts = [to_markdown(opening, width=PAGE_WIDTH)]
    for result in found:
        parts.append(to_markdown(_build_blocks(result), width=PAGE_WIDTH))
        if (figure := result.folder / "verdict.png").exists():
            link = quote(os.path.relpath(figure, place))
            parts.append(f"![Evidence for the verdict on {result.table.ablation}]({link})\n")
    return "\n".join(parts)


_SUBJECT = (
    "Lazy Attention (arXiv 2601.00919) changes attention in two ways. Elastic-Softmax subtracts a threshold from the "
    "softmax weights, a learned tau divided by the number of visible keys, and clips them at 0, so that a query can "
    "ignore all keys. A learned bias for each distance between query and key is added to the scores. Softmax must "
    "distribute a mass of 1, and often puts much of it on the first key: the attention sink. This page tests claims of "
    "the paper and questions of its reviewers (R1 to R15)."
)
_PROCEDURE = (
    "Each question is declared before its run: a claim, one primary outcome, at most five contrasts (such as a "
    "difference between variants), a margin (the smallest difference that matters), a rule, all seeds, and the "
    "looks: the numbers of seeds after which it may be decided (docs/method.md, section 10). At each look every "
    "contrast is a difference per seed, or a statement that holds in a seed or not; only what is open is trained "
    "further. The verdict is one of:"
)
_VERDICTS = (
    "Supported: every contrast is shown to satisfy the rule. A claimed difference is shown to have its sign; it may be "
    f"smaller than the margin. Of claims of which a contrast is false, at most {100 * ALPHA:g} % are supported in "
    "error if outcomes are normal, and more if they are very skewed (docs/results/looks.md). The interval that shows "
    "it is shorter than the simultaneous one that is printed: in the figures it is the thick part.",
    "Refuted: at least one contrast is shown to violate it. A claimed difference is not there by the margin, a claimed "
    "equivalence is off by more than half of it, a statement holds in fewer than three quarters of trainings. Of "
    "claims that hold by the margin, equally few are refuted in error.",
    "Undecided: neither, so far, or after the last look. The details have the probability that a later look decides. "
    "Futile means that none would, if means and spreads stay.",
)
_SCOPE = (
    "All other results in a question's table are exploratory. The models have 50,000 to a million parameters, but for "
    "SmolLM2-135M, a trained one: the results are evidence about the mechanism on these tasks, not about language "
    "models that are trained with it. A question that follows another has other seeds, and sometimes another claim; "
    "docs/results/first-round.md has the first attempts. docs/results/README.md lists all verdicts. "
    "Written by: lit-lazy ablate verdicts docs/results --out docs/questions.md --insert README.md --insert "
    "docs/results/README.md"
)


def _build_reviewer_table(answers: Sequence[Answer]) -> Tabular:
    """The reviewers' questions with the verdicts on a part of each; ablations/reviewers.toml has the questions."""
    path = find_words("reviewers")
    asked = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
    verdicts: dict[str, list[str]] = {number: [] for number in asked}
    for answer in answers:
        for number in re.findall(r"\bR\d+\b", answer.source):
            verdicts.setdefault(number, []).append(f"{answer.question}: {answer.status}")
    rows = tuple((n, one["asked"], "; ".join(verdicts[n]) or "–", one["open"]) for n, one in asked.items())
    return Tabular(("", "Question", "Verdicts on a part of it", "Still open"), rows, 4)


def _build_blocks(result: QuestionResult) -> list[Block]:
    table = result.table
    declared, verdict = result.declared, table.verdict
    blocks: list[Block] = [Heading(f"{table.ablation} on {table.base}", 2), *map(Paragraph, describe_unlearned(table))]
    if verdict is None:
        return [*blocks, Paragraph(f"Not decided yet: {declared.claim} {describe_missing(declared, table)}")]
    column = table.columns_by_key[declared.primary]
    spent = "" if table.seconds is None else f" Training and evaluation: {format_duration(table.seconds)}."
    rule = ", ".join([declared.rule, *describe_bounds(declared, column)])
    where = f"in {declared.commit}" if declared.commit else "and not committed before its run"
    about = (
        f"Primary outcome: {column.title}. Rule: {rule}. Seeds: {_format_seeds(declared.seeds)}. "
        f"Declared {where} (digest {declared.digest}), run at {table.git_sha}.{spent} "
        f"Folder: {result.folder}. Made by: {table.command}"
    )
    lines = [*describe_contrasts(declared, verdict, column), *describe_looks(declared, verdict)]
    repeated = [Paragraph(describe_earlier(declared))] if declared.after else []
    return [*blocks, Paragraph(verdict.sentence), BulletList(tuple(lines)), *repeated, Paragraph(about)]


def _format_seeds(seeds: Sequence[int]) -> str:
    """Such as `100 to 179`; each one if they are few or not consecutive."""
    consecutive = len(seeds) > 5 and tuple(seeds) == tuple(range(seeds[0], seeds[0] + len(seeds)))
    return f"{seeds[0]} to {seeds[-1]}" if consecutive else ", ".join(map(str, seeds))
