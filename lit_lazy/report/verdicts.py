"""The verdicts of questions, from their tables, for a terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from lit_lazy.report.findings import QuestionResult
from lit_lazy.support.console import format_duration
from lit_lazy.table.document import Block, BulletList, Heading, Paragraph, to_markdown
from lit_lazy.table.finding_text import describe_unlearned
from lit_lazy.table.stored import TABLE, read_table
from lit_lazy.table.verdicts import (
    describe_bounds,
    describe_contrasts,
    describe_earlier,
    describe_looks,
    describe_missing,
)


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
