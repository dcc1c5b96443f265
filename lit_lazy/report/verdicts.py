"""The verdicts of questions, from their tables, for a terminal."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from lit_lazy.report.findings import QuestionResult
from lit_lazy.support.console import format_duration
from lit_lazy.table.document import Block, Heading, Paragraph, to_markdown
from lit_lazy.table.render import build_verdict
from lit_lazy.table.stored import TABLE, read_table
from lit_lazy.table.verdicts import describe_bounds


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
    blocks = [Heading(f"{table.ablation} on {table.base}", 2), *build_verdict(declared, table)]
    if table.verdict is None:
        return blocks
    column = table.columns_by_key[declared.primary]
    spent = "" if table.seconds is None else f" Training and evaluation: {format_duration(table.seconds)}."
    rule = ", ".join([declared.rule, *describe_bounds(declared, column)])
    where = f"in {declared.commit}" if declared.commit else "and not committed before its run"
    about = (
        f"Primary outcome: {column.title}. Rule: {rule}. Seeds: {_format_seeds(declared.seeds)}. "
        f"Declared {where} (digest {declared.digest}), run at {table.git_sha}.{spent} "
        f"Folder: {result.folder}. Made by: {table.command}"
    )
    return [*blocks, Paragraph(about)]


def _format_seeds(seeds: Sequence[int]) -> str:
    """Such as `100 to 179`; each one if they are few or not consecutive."""
    consecutive = len(seeds) > 5 and tuple(seeds) == tuple(range(seeds[0], seeds[0] + len(seeds)))
    return f"{seeds[0]} to {seeds[-1]}" if consecutive else ", ".join(map(str, seeds))
