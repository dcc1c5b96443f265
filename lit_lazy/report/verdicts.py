"""The verdicts of questions, from their tables: for a terminal, and as docs/questions.md."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from lit_lazy.support.console import format_duration
from lit_lazy.support.errors import describe_exception
from lit_lazy.table.document import Block, BulletList, Heading, Paragraph, Tabular, to_markdown
from lit_lazy.table.records import Table
from lit_lazy.table.verdicts import add_verdict, describe_bounds, describe_contrasts, describe_missing

REVIEWERS = {
    "R1": ("exact formula, sign and normalisation of the threshold", "no experiment; docs/method.md, sections 1 and 2"),
    "R2": ("sensitivity to the initial tau", "on text and at larger scale"),
    "R3": (
        "renormalisation; drift of the scale across layers and lengths",
        "drift at larger scale; every run logs it as watch/mass_layer_* and watch/mass_quarter_*",
    ),
    "R4": ("mass, in addition to sink and density: how much survives, and where", "at larger scale"),
    "R5": (
        "gain of Elastic-Softmax without the bias, tested over seeds",
        "beyond 6 million tokens and 130,000 parameters",
    ),
    "R6": (
        "sigmoid, sparsemax and entmax under the same recipe",
        "sparsemax and entmax apart from the sink; rivals at their best rates; docs/results/rivals-* has the losses",
    ),
    "R7": (
        "time and memory compared with softmax",
        "on a GPU; docs/results/bench-step.md has peak memory and other lengths on CPU cores",
    ),
    "R8": ("speed-up from sparsity", "kernels that skip empty tiles, on a GPU and on the scores of such models"),
    "R9": ("value of RoPE's base, and sensitivity to it", "the paper's value; beyond the training length"),
    "R10": (
        "range of the bias, memory at 32k tokens, distances beyond the range",
        "training at 32k tokens; ablations/q_bias_range.py computes its memory",
    ),
    "R11": (
        "gradients through the ReLU: dead heads, instability, remedies",
        "the gradients themselves; instability at scale",
    ),
    "R12": ("a fixed window instead", "longer contexts; windows in only some layers"),
    "R13": ("length extrapolation", "beyond four times the training length; long-context benchmarks"),
    "R14": ("an evicting cache once the sink is gone", "larger models; caches that evict by weight"),
    "R15": ("bytes of the cache and of activations", "on a GPU, with bf16"),
}
"""The reviewers' questions (OpenReview, paraphrased), and what the experiments leave open."""

PAGE_WIDTH = 1000
"""Maximum width of a page's tables in characters: large, so that they are not split."""


class QuestionResult(NamedTuple):
    """The table of a question and its folder."""

    folder: Path
    table: Table


def read_questions(folder: Path) -> list[QuestionResult]:
    """The tables of all questions below a folder, by name, with verdicts recomputed from their values.

    Raises a one-line ValueError if a table cannot be read.
    """
    results = []
    for path in sorted(folder.glob("*/table.json")):
        try:
            table = Table.from_json(json.loads(path.read_text()))
            table = add_verdict(table, table.declaration)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"{str(path)!r}: is no table.json ({describe_exception(error)})") from None
        if table.declaration is not None:
            results.append(QuestionResult(path.parent, table))
    return results


def format_summary(found: Iterable[QuestionResult]) -> str:
    """Each verdict with its contrasts, seeds, commits and command, for a terminal."""
    return to_markdown([block for result in found for block in _build_blocks(result)])


def format_page(found: Sequence[QuestionResult], folder: Path) -> str:
    """The page docs/questions.md; links to figures are relative to `folder`."""
    opening: list[Block] = [
        Heading("Questions", 1),
        Paragraph(_SUBJECT),
        Paragraph(_PROCEDURE),
        BulletList(_VERDICTS),
        Paragraph(_SCOPE),
        _build_verdict_table(found),
        Heading("Questions of the reviewers", 2),
        _build_reviewer_table(found),
    ]
    parts = [to_markdown(opening, width=PAGE_WIDTH)]
    for result in found:
        parts.append(to_markdown(_build_blocks(result), width=PAGE_WIDTH))
        if (figure := result.folder / "verdict.png").exists():
            link = quote(os.path.relpath(figure, folder))
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
    "difference between variants), a margin within which a difference counts as none, and a rule (docs/method.md, "
    "section 10). Every variant is trained with n seeds. The verdict is one of:"
)
_VERDICTS = (
    "Supported: every contrast is shown to satisfy the rule.",
    "Refuted: at least one contrast is shown to violate it. A claimed difference has the other sign or is equivalent "
    "to 0 within the margin; a claimed equivalence is off by more than the margin; a sink that is claimed to be "
    "removed is still there, or others lack it as well.",
    "Undecided: neither. The number of seeds that would decide assumes today's means and spreads; since both change "
    "with more seeds, its chance to decide is about even.",
)
_SCOPE = (
    "All other results in a question's table are exploratory. The models have 50,000 to 150,000 parameters: the "
    "results are evidence about the mechanism on these tasks, not about language models. Written by: lit-lazy ablate "
    "verdicts docs/results --out docs/questions.md"
)


def _build_verdict_table(found: Sequence[QuestionResult]) -> Tabular:
    rows = []
    for _, table in found:
        declared = table.declaration
        assert declared is not None
        status = _format_status(table) + (" (exploratory)" if declared.exploratory else "")
        rows.append((table.ablation, declared.claim, declared.source, status, str(len(declared.seeds))))
    return Tabular(("Question", "Claim", "Asked by", "Verdict", "n"), tuple(rows), 4)


def _format_status(table: Table) -> str:
    return "not decided yet" if table.verdict is None else table.verdict.status


def _build_reviewer_table(found: Sequence[QuestionResult]) -> Tabular:
    verdicts: dict[str, list[str]] = {number: [] for number in REVIEWERS}
    for _, table in found:
        assert table.declaration is not None
        for number in re.findall(r"\bR\d+\b", table.declaration.source):
            verdicts.setdefault(number, []).append(f"{table.ablation}: {_format_status(table)}")
    rows = tuple((n, about, "; ".join(verdicts[n]) or "–", left) for n, (about, left) in REVIEWERS.items())
    return Tabular(("", "Question", "Verdicts", "Still open"), rows, 4)


def _build_blocks(result: QuestionResult) -> list[Block]:
    table = result.table
    declared, verdict = table.declaration, table.verdict
    assert declared is not None
    blocks: list[Block] = [Heading(f"{table.ablation} on {table.base}", 2)]
    if verdict is None:
        return [*blocks, Paragraph(f"Not decided yet: {declared.claim} {describe_missing(declared, table)}")]
    column = table.columns_by_key[declared.primary]
    spent = "" if table.seconds is None else f" Training and evaluation: {format_duration(table.seconds)}."
    about = (
        f"Primary outcome: {column.title}. Rule: {declared.rule}, {', '.join(describe_bounds(declared, column))}. "
        f"Seeds: {', '.join(map(str, declared.seeds))}. Declared in {declared.commit or 'no commit'} "
        f"({declared.digest}), run at {table.git_sha}.{spent} Folder: {result.folder}. Made by: {table.command}"
    )
    return [
        *blocks,
        Paragraph(verdict.sentence),
        BulletList(tuple(describe_contrasts(declared, verdict, column))),
        Paragraph(about),
    ]
