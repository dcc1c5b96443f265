"""The verdicts of questions that were run, from the tables they left: in a terminal, and as docs/questions.md."""

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
    "R1": ("exact formula, sign and normalisation of the threshold", "docs/method.md, sections 1 and 2; no experiment"),
    "R2": ("sensitivity to the initial tau", "on text, and at larger scale"),
    "R3": (
        "renormalising; drift of scale across layers and lengths",
        "drift at larger scale; watch/mass_layer_* and watch/mass_quarter_* of any run show it",
    ),
    "R4": ("mass beside sink and density: what survives, where it sits", "at larger scale"),
    "R5": (
        "gain of Elastic-Softmax apart from the bias, over seeds, tested",
        "beyond 6 million tokens and 130,000 parameters",
    ),
    "R6": (
        "sigmoid, sparsemax, entmax on one recipe",
        "sparsemax and entmax beside the sink, rivals at their best rates; docs/results/rivals-* shows the losses",
    ),
    "R7": (
        "time and memory against softmax",
        "on a GPU; peaks and other lengths on CPU cores: docs/results/bench-step.md",
    ),
    "R8": ("does sparsity make anything faster", "kernels that skip, on a GPU and on such models' own scores"),
    "R9": ("value of RoPE's base, and sensitivity to it", "the paper's own value; beyond the training's length"),
    "R10": (
        "range of the bias, memory at 32k, beyond its range",
        "training at 32k; its memory by arithmetic in ablations/q_bias_range.py",
    ),
    "R11": (
        "gradients through the ReLU: dead heads, instability, remedies",
        "gradients themselves, instability at scale",
    ),
    "R12": ("a fixed window in its place", "longer contexts; windows in some layers alone"),
    "R13": ("length extrapolation", "beyond four times the training's length; benchmarks of long context"),
    "R14": (
        "a cache that evicts once the sink is gone",
        "larger models; caches that choose what they keep by its weight",
    ),
    "R15": ("bytes of the cache and of activations", "on a GPU, under bf16"),
}
"""The reviewers' questions (OpenReview, in our words), and what is open of each beside the questions that answer it."""

PAGE_WIDTH = 1000
"""Characters of a page's tables, which a browser lays out."""


class QuestionResult(NamedTuple):
    """The table of a question, and the folder that holds it."""

    folder: Path
    table: Table


def read_questions(folder: Path) -> list[QuestionResult]:
    """Every question's table below a folder, by name, with the verdict that its values give.

    Raises ValueError, in one line, for one that cannot be read.
    """
    found = []
    for path in sorted(folder.glob("*/table.json")):
        try:
            table = Table.from_json(json.loads(path.read_text()))
            table = add_verdict(table, table.declaration)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"{str(path)!r}: is no table.json ({describe_exception(error)})") from None
        if table.declaration is not None:
            found.append(QuestionResult(path.parent, table))
    return found


def format_summary(found: Iterable[QuestionResult]) -> str:
    """Each verdict with its contrasts, seeds, commits and command, for a terminal."""
    return to_markdown([block for one in found for block in _build_blocks(one)])


def format_page(found: Sequence[QuestionResult], folder: Path) -> str:
    """docs/questions.md; folder: the page's, from which its figures are linked."""
    opening: list[Block] = [
        Heading("Questions", 1),
        Paragraph(_ABOUT),
        _build_verdict_table(found),
        Heading("What the reviewers asked", 2),
        _build_reviewer_table(found),
    ]
    parts = [to_markdown(opening, width=PAGE_WIDTH)]
    for one in found:
        parts += [to_markdown(_build_blocks(one), width=PAGE_WIDTH), *_link_figure(one, folder)]
    return "\n".join(parts)


def _link_figure(one: QuestionResult, folder: Path) -> list[str]:
    """The Markdown of its figure, if it has one."""
    file = one.folder / "verdict.png"
    link = quote(os.path.relpath(file, folder))
    return [f"![What the verdict on {one.table.ablation} rests on]({link})\n"] if file.exists() else []


_ABOUT = (
    "Each question was declared before it was run: one primary outcome, at most five contrasts, a margin and the rule "
    "of its verdict (docs/method.md, which has the rules). Supported: every contrast is shown to be as its rule says. "
    "Refuted: one is shown not to be: it goes the other way, or is the same within the margin where a difference is "
    "claimed; it differs by more than the margin where none is; or the sink is still there, or others lack it as well. "
    "Undecided: neither. The seeds that would decide are those at which today's means and spreads would; since both "
    "move, that is about an even chance. All else in a question's table is exploratory. The models have fifty to a "
    "hundred and fifty thousand parameters: evidence about the mechanism on these tasks, and none about language "
    "models. Written by: lit-lazy ablate verdicts docs/results --out docs/questions.md"
)


def _build_verdict_table(found: Sequence[QuestionResult]) -> Tabular:
    rows = []
    for _, table in found:
        declared, verdict = table.declaration, table.verdict
        assert declared is not None
        status = "not decided yet" if verdict is None else verdict.status
        exploratory = " (exploratory)" if declared.exploratory else ""
        rows.append((table.ablation, declared.claim, declared.source, status + exploratory, str(len(declared.seeds))))
    return Tabular(("Question", "Claim", "Asked by", "Verdict", "n"), tuple(rows), 4)


def _build_reviewer_table(found: Sequence[QuestionResult]) -> Tabular:
    asked: dict[str, list[str]] = {number: [] for number in REVIEWERS}
    for _, table in found:
        assert table.declaration is not None
        status = "not decided yet" if table.verdict is None else table.verdict.status
        for number in re.findall(r"\bR\d+\b", table.declaration.source):
            asked.setdefault(number, []).append(f"{table.ablation}: {status}")
    rows = tuple((n, about, "; ".join(asked[n]) or "–", left) for n, (about, left) in REVIEWERS.items())
    return Tabular(("", "Asked", "Decided by", "Open"), rows, 4)


def _build_blocks(one: QuestionResult) -> list[Block]:
    table = one.table
    declared, verdict = table.declaration, table.verdict
    assert declared is not None
    blocks: list[Block] = [Heading(f"{table.ablation} on {table.base}", 2)]
    if verdict is None:
        return [*blocks, Paragraph(f"Not decided yet: {declared.claim} {describe_missing(declared, table)}")]
    (column,) = (column for column in table.columns if column.key == declared.primary)
    spent = "" if table.seconds is None else f", trained and measured for {format_duration(table.seconds)}"
    about = (
        f"Primary outcome {column.title}, rule {declared.rule}, {', '.join(describe_bounds(declared, column))}, seeds "
        f"{', '.join(map(str, declared.seeds))}; declared in {declared.commit or 'no commit'} ({declared.digest}), run "
        f"at {table.git_sha}{spent}. In {one.folder}. Made by: {table.command}"
    )
    return [
        *blocks,
        Paragraph(verdict.sentence),
        BulletList(tuple(describe_contrasts(verdict, column))),
        Paragraph(about),
    ]
