"""The verdicts of questions, from their tables: for a terminal, as docs/questions.md, and in the README."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from textwrap import fill
from typing import NamedTuple
from urllib.parse import quote

from lit_lazy.report.template import mark_part, replace_parts
from lit_lazy.support.console import format_duration
from lit_lazy.support.errors import describe_exception
from lit_lazy.table.declaration import Finding, Verdict
from lit_lazy.table.document import Block, BulletList, Heading, Paragraph, Tabular, to_markdown
from lit_lazy.table.finding_text import describe_unlearned
from lit_lazy.table.records import Table
from lit_lazy.table.verdicts import (
    add_verdict,
    describe_bounds,
    describe_contrasts,
    describe_earlier,
    describe_looks,
    describe_missing,
    format_estimate,
)

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

TOPICS = {
    "The sink": {
        "q_sink": "it alone removes the sink",
        "q_sink_2": "no single part of it is needed to remove the sink",
        "q_sink_tasks": "it removes the sink on every chain",
        "q_mask": "it removes BOS's sink wherever BOS stands",
        "q_null": "its mass detects absent keys best",
    },
    "Sparsity": {
        "q_sparsity": "it leaves tiles empty",
        "q_sparsity_null": "training makes it sparser than chance",
        "q_matched": "it equals a softmax over as many keys",
    },
    "Quality on text": {
        "q_text": "it and a bias both lower the loss on text",
        "q_text_2": "it lowers the loss on text",
        "q_text_rates": "it lowers that loss early",
        "q_window": "it beats fixed windows",
        "q_lasts": "its gain lasts over training",
        "q_scale": "its gain lasts with width",
    },
    "The bias and positions": {
        "q_bias_gain": "the bias lowers the loss on text",
        "q_bias_range": "a short bias is enough",
        "q_position": "the bias finds what counts among distractors",
        "q_rope_base": "RoPE's base does not matter",
        "q_rope_base_2": "it is less sensitive to RoPE's base",
    },
    "Length and streaming": {
        "q_length": "it extrapolates better",
        "q_streaming": "a cache that forgets costs it less",
    },
    "The threshold": {"q_tau": "a rising tau speeds up learning"},
    "Cost": {"q_cost": "its step costs no more on a CPU"},
}
"""The parts of the paper's abstract, and in short what each question claims about them, "it" being Elastic-Softmax.

A later attempt without an entry has that of the one before it.
"""
OTHER = "Other questions"
"""Topic of a question without an entry."""
ORDINALS = ("first", "second", "third", "fourth", "fifth")
README_PART = "verdicts"
README_WIDTH = 125
"""Characters per line of the README."""

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
    attempts = _list_attempts(found)
    opening: list[Block] = [
        Heading("Questions", 1),
        Paragraph(_SUBJECT),
        Paragraph(_PROCEDURE),
        BulletList(_VERDICTS),
        *map(Paragraph, _LOOKS),
        Paragraph(_SCOPE),
        Paragraph(f"All questions together took {_format_hours(result.table for result in found)} core-hours."),
    ]
    for topic, results in _group_by_topic(attempts).items():
        opening += [Heading(topic, 2), _build_lines(results)]
    opening += [Heading("Questions of the reviewers", 2), _build_reviewer_table([last for *_, last in attempts])]
    parts = [to_markdown(opening, width=PAGE_WIDTH)]
    for result in found:
        parts.append(to_markdown(_build_blocks(result), width=PAGE_WIDTH))
        if (figure := result.folder / "verdict.png").exists():
            link = quote(os.path.relpath(figure, folder))
            parts.append(f"![Evidence for the verdict on {result.table.ablation}]({link})\n")
    return "\n".join(parts)


def update_readme(readme: str, found: Sequence[QuestionResult], page: str) -> str:
    """The README with the newest verdicts between its markers. page: its link to the page of questions.

    Raises a one-line ValueError if it has no markers.
    """
    claims: dict[str, list[str]] = {"supported": [], "refuted": [], "undecided": [], "not decided yet": []}
    for history in chain.from_iterable(_group_by_topic(_list_attempts(found)).values()):
        _, claim = _find_topic(history)
        claims[_get_status(history[-1].table)].append(claim + _mark_exploratory(history[-1].table))
    first = f'[Questions]({page}) about Elastic-Softmax ("it"), declared before their runs. '
    lines = [f"{status.capitalize()}: {'; '.join(listed)}." for status, listed in claims.items() if listed]
    wrapped = [
        fill(f"- {text}", README_WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
        for text in (first + lines[0], *lines[1:])
    ]
    try:
        return replace_parts(readme, {README_PART: "\n".join(wrapped) + "\n"})
    except ValueError:
        markers = " and ".join(map(repr, mark_part(README_PART, "").splitlines()))
        raise ValueError(f"the README has no place for the verdicts: add the lines {markers}") from None


def _list_attempts(found: Sequence[QuestionResult]) -> list[list[QuestionResult]]:
    """The attempts at each claim, oldest first; two later questions may follow one earlier question."""
    by_name = {result.table.ablation: result for result in found}
    superseded = {_get_earlier(result) for result in found}
    histories = []
    for result in found:
        history = [result]
        while (earlier := by_name.get(_get_earlier(history[0]))) and earlier not in history:
            history.insert(0, earlier)
        if result.table.ablation not in superseded:
            histories.append(history)
    return histories


def _get_earlier(result: QuestionResult) -> str:
    assert result.table.declaration is not None
    return result.table.declaration.after


def _find_topic(history: Sequence[QuestionResult]) -> tuple[str, str]:
    """Topic and short claim of the newest attempt that has an entry."""
    last = history[-1].table.declaration
    assert last is not None
    # The earlier question may have no table here.
    names = [result.table.ablation for result in reversed(history)] + [_get_earlier(history[0])]
    known = {name: (topic, text) for topic, claims in TOPICS.items() for name, text in claims.items()}
    return next((known[name] for name in names if name in known), (OTHER, last.claim.rstrip(".")))


def _group_by_topic(attempts: Iterable[list[QuestionResult]]) -> dict[str, list[list[QuestionResult]]]:
    """The attempts by topic, in the order of the topics."""
    groups: dict[str, list[list[QuestionResult]]] = {topic: [] for topic in (*TOPICS, OTHER)}
    for history in attempts:
        groups[_find_topic(history)[0]].append(history)
    return {topic: results for topic, results in groups.items() if results}


def _build_lines(histories: Iterable[Sequence[QuestionResult]]) -> Tabular:
    """A line per question: its newest attempt, and the verdicts of the earlier ones."""
    rows = []
    for history in histories:
        table = history[-1].table
        declared, verdict = table.declaration, table.verdict
        assert declared is not None
        status = [
            _get_status(table) + _mark_exploratory(table),
            *(f"{ORDINALS[i]} attempt: {_format_status(result.table)}" for i, result in enumerate(history[:-1])),
        ]
        decided, n, look = ("–",) * 3
        if verdict is not None:
            part = _choose_deciding(verdict)
            decided = f"{part.name}: {format_estimate(declared, part, table.columns_by_key[declared.primary])}"
            n, look = str(verdict.n), f"{len(verdict.looks)} of {len(declared.looks)}" if verdict.looks else "–"
        hours = _format_hours([table])
        rows.append((table.ablation, declared.claim, "; ".join(status), decided, n, look, hours))
    header = ("Question", "Claim", "Verdict", "Decided by", "n", "Look", "Core-hours")
    return Tabular(header, tuple(rows), 4)


def _choose_deciding(verdict: Verdict) -> Finding:
    """Of the contrasts with the status of the claim the one that got it last, or the first of these."""
    return max((part for part in verdict.parts if part.status == verdict.status), key=lambda part: part.n or 0)


def _format_hours(tables: Iterable[Table]) -> str:
    """Training and evaluation in hours of one core; – if no table knows it."""
    spent = [table.seconds for table in tables if table.seconds is not None]
    return f"{sum(spent) / 3600:.2f}" if spent else "–"


def _get_status(table: Table) -> str:
    return "not decided yet" if table.verdict is None else table.verdict.status


def _format_status(table: Table) -> str:
    """`undecided (n = 5)`"""
    return _get_status(table) + ("" if table.verdict is None else f" (n = {table.verdict.n})")


def _mark_exploratory(table: Table) -> str:
    verdict = table.verdict
    return "" if verdict is None else ", futile" * verdict.futile + " (exploratory)" * bool(verdict.exploratory)


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
    "section 10). Every variant is trained with n seeds, and the interval of a contrast says how far its mean can be "
    "trusted. The verdict is one of:"
)
_VERDICTS = (
    "Supported: every contrast is shown to satisfy the rule.",
    "Refuted: at least one contrast is shown to violate it. A claimed difference has the other sign or is equivalent "
    "to 0 within the margin; a claimed equivalence is off by more than the margin; a sink that is claimed to be "
    "removed is still there, or others lack it as well.",
    "Undecided: neither, for now. Of five seeds the number that would decide assumes today's means and spreads; since "
    "both change with more seeds, its chance to decide is about even.",
)
_LOOKS = (
    "The first attempts had five seeds, too few for most. Later ones are decided at looks: after 10 seeds and, if that "
    "is not enough, after 20, 40 and 80. Looking often finds anything by chance, so each look gets only a share of the "
    "error that is allowed in all: 2.5 % for wrong support and 2.5 % for wrong refutation. What is decided stays "
    "decided, and its variants are trained no further. A claimed difference is refuted as soon as it is shown to fall "
    "short of the margin, even on the right side of 0; a claimed equivalence as soon as it is shown to be off by half "
    "of the margin; a statement about single trainings as soon as it is shown to hold in fewer than three quarters of "
    "them, while its support needs more than half. Between these edges neither verdict is wrong.",
    "Futile: undecided, and if means and spreads stay no look that is left decides it. A variant that did not learn "
    "its task decides nothing, and is named first. A claim that is asked again has other seeds the second time; both "
    "verdicts are shown, the newest first.",
)
_SCOPE = (
    "All other results in a question's table are exploratory. The models have 50,000 to 150,000 parameters: the "
    "results are evidence about the mechanism on these tasks, not about language models. Written by: lit-lazy ablate "
    "verdicts docs/results --out docs/questions.md --readme README.md"
)


def _build_reviewer_table(found: Sequence[QuestionResult]) -> Tabular:
    verdicts: dict[str, list[str]] = {number: [] for number in REVIEWERS}
    for _, table in found:
        assert table.declaration is not None
        for number in re.findall(r"\bR\d+\b", table.declaration.source):
            verdicts.setdefault(number, []).append(f"{table.ablation}: {_get_status(table)}")
    rows = tuple((n, about, "; ".join(verdicts[n]) or "–", left) for n, (about, left) in REVIEWERS.items())
    return Tabular(("", "Question", "Verdicts", "Still open"), rows, 4)


def _build_blocks(result: QuestionResult) -> list[Block]:
    table = result.table
    declared, verdict = table.declaration, table.verdict
    assert declared is not None
    blocks: list[Block] = [Heading(f"{table.ablation} on {table.base}", 2), *map(Paragraph, describe_unlearned(table))]
    if verdict is None:
        return [*blocks, Paragraph(f"Not decided yet: {declared.claim} {describe_missing(declared, table)}")]
    column = table.columns_by_key[declared.primary]
    spent = "" if table.seconds is None else f" Training and evaluation: {format_duration(table.seconds)}."
    about = (
        f"Asked by: {declared.source}. Primary outcome: {column.title}. Rule: {declared.rule}, "
        f"{', '.join(describe_bounds(declared, column))}. Seeds: {', '.join(map(str, declared.seeds[: verdict.n]))}. "
        f"Declared in {declared.commit or 'no commit'} ({declared.digest}), run at {table.git_sha}.{spent} "
        f"Folder: {result.folder}. Made by: {table.command}"
    )
    return [
        *blocks,
        Paragraph(verdict.sentence),
        BulletList((*describe_contrasts(declared, verdict, column), *describe_looks(declared, verdict))),
        *([Paragraph(describe_earlier(declared))] if declared.after else []),
        Paragraph(about),
    ]
