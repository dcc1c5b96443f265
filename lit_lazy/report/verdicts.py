"""The verdicts of questions, from their tables: for a terminal, and as docs/questions.md."""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import NamedTuple
from urllib.parse import quote

from lit_lazy.support.console import format_duration
from lit_lazy.support.errors import describe_exception
from lit_lazy.table.declaration import Declaration, Verdict
from lit_lazy.table.document import Block, BulletList, Heading, Paragraph, Tabular, to_markdown
from lit_lazy.table.finding_text import describe_unlearned
from lit_lazy.table.records import Table
from lit_lazy.table.statistics import LEAST
from lit_lazy.table.verdicts import (
    add_verdict,
    describe_bounds,
    describe_contrasts,
    describe_earlier,
    describe_looks,
    describe_missing,
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
        "training on a GPU; docs/results/kernels has steps, docs/results/bench-step.md peak memory on CPU cores",
    ),
    "R8": (
        "speed-up from sparsity",
        "kernels that skip empty tiles, on the scores of such models (docs/results/kernels/bench.md: on random ones)",
    ),
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

_ALSO_ABOUT: Mapping[str, str] = {"q_sink_2": ", R3"}
"""Reviewers' questions that a declaration did not name."""


class Phrase(NamedTuple):
    """A question's claim in the README, about Elastic-Softmax ("it"), without a full stop."""

    claim: str
    found: str = ""
    """What was found instead, if the claim is refuted."""


SUBJECTS: Mapping[str, Mapping[str, Phrase]] = {
    "The sink": {
        "q_sink": Phrase("It alone removes the sink", "sigmoid, softpick, ReLU/n and a sink logit do so too"),
        "q_sink_2": Phrase(
            "No single part of it is needed to remove the sink", "where the weights sum to 1 the sink stays"
        ),
        "q_sink_tasks": Phrase("It leaves as little on five chains"),
        "q_mask": Phrase("It leaves less than a quarter of BOS's sink at four places"),
        "q_null": Phrase("Its mass shows absent keys better than its rivals' does", "softpick's does so better"),
    },
    "Sparsity": {
        "q_sparsity": Phrase("It empties 5 % of a kernel's tiles", "with the bias it does in one seed of ten"),
        "q_sparsity_null": Phrase("It is sparser than random scores", "not without a bias"),
        "q_matched": Phrase("It is no worse than a softmax over as many keys"),
    },
    "Loss on text": {
        "q_text": Phrase("Its loss on text is 0.029 bits/byte below softmax's"),
        "q_text_rates": Phrase("After 600 steps it is 0.061 below"),
        "q_window": Phrase(
            "It beats softmax within a short window",
            "within 16 keys softmax is 0.036 bits/byte better",
        ),
        "q_scale": Phrase("Its gain lasts as models grow"),
        "q_lasts": Phrase("Its gain lasts in longer trainings", "twice the steps cost it 0.012 bits/byte"),
    },
    "Bias and positions": {
        "q_bias_gain": Phrase("A learned bias lowers the loss by 0.013"),
        "q_bias_range": Phrase("A bias over 8 distances suffices"),
        "q_position": Phrase("That bias, with RoPE, finds keys among distractors"),
        "q_rope_base": Phrase("Over RoPE's bases its loss rises 0.017 less than softmax's"),
    },
    "Length and streaming": {
        "q_length": Phrase(
            "It extrapolates better to longer texts",
            "at four times the length, with a learned bias, it is 0.73 bits/byte behind",
        ),
        "q_streaming": Phrase("It loses less when a cache forgets", "the difference is 0.003 bits/byte"),
    },
    "The threshold": {
        "q_tau": Phrase("It learns sooner if tau rises from 0", "with a ramp it did in one seed of ten"),
    },
    "A trained model": {
        "q_adapt_loss": Phrase("SmolLM2 keeps its loss", "after 66,000 tokens it is 0.22 nats higher"),
        "q_adapt_sink": Phrase("SmolLM2 loses its sink", "21 % of heads and sequences keep one, 59 % had one"),
        "q_adapt_sparsity": Phrase("SmolLM2 becomes 2.9 points sparser than random scores"),
    },
    "Compute-optimal models": {
        "q_frontier_loss": Phrase("With its bias it is no worse than softmax on 20 tokens a parameter"),
        "q_frontier_sink": Phrase("It removes the sink of models trained so"),
        "q_frontier_sparsity": Phrase("Such models are sparser than random scores"),
        "q_frontier_length": Phrase("They read four times their length no worse than softmax with the bias"),
    },
    "Cost": {"q_cost": Phrase("On a CPU it trains at softmax's cost")},
}
"""What of the abstract each question bears on, and its claim; a repeated question (`q_text_2`) has the entry of the
first one unless it has its own."""

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
            table = Table.from_json(json.loads(path.read_text(encoding="utf-8")))
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
        Heading("Answers", 2),
        *_build_answers(found),
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


def replace_findings(readme: str, found: Sequence[QuestionResult]) -> str:
    """The text of a README with the lines between its two markers made anew from the latest verdicts.

    Raises a one-line ValueError if it lacks a marker.
    """
    before, start, rest = readme.partition(_MARKERS[0])
    _, end, after = rest.partition(_MARKERS[1])
    if not (start and end):
        raise ValueError(f"--readme: the file lacks the lines {_MARKERS[0]} and {_MARKERS[1]}; add both")
    return f"{before}{start}\n{_format_findings(found)}{end}{after}"


_MARKERS = ("<!-- verdicts -->", "<!-- end of verdicts -->")
_LINE = 120


def _format_findings(found: Sequence[QuestionResult]) -> str:
    """How many claims have which verdict, and a bullet per verdict with the claims and what was found instead."""
    claims: dict[str, list[str]] = {"supported": [], "refuted": [], "open": []}
    for result in _select_latest(found):
        phrase, status = _find_subject(result.table.ablation)[1], _format_status(result.table)
        if phrase.claim and status in claims:
            claims[status].append(f"*{phrase.claim}*: {phrase.found}." if status == "refuted" else f"{phrase.claim}.")
        elif phrase.claim:
            claims["open"].append(f"{phrase.claim}.")
    counts = ", ".join(f"{len(listed)} {status}" for status, listed in claims.items())
    lines = [f'Of {sum(map(len, claims.values()))} claims about Elastic-Softmax, "it" below: {counts}.', ""]
    lines += [f"- {status.capitalize()}: {' '.join(listed)}" for status, listed in claims.items() if listed]
    return "".join(fill(line, _LINE, subsequent_indent="  ", break_on_hyphens=False) + "\n" for line in lines)


def _find_subject(question: str) -> tuple[str, Phrase]:
    """The subject of a question and its phrase; "Other" and no claim for a question that is not the project's."""
    for name in (question, re.sub(r"_\d+$", "", question)):
        for subject, phrases in SUBJECTS.items():
            if name in phrases:
                return subject, phrases[name]
    return "Other", Phrase("")


def _select_latest(found: Sequence[QuestionResult]) -> list[QuestionResult]:
    """The questions whose place no repetition takes, by subject."""
    names = {result.table.ablation for result in found}
    repeated = {_get_declaration(result.table).after for result in found if _is_repetition(result.table, names)}
    latest = [result for result in found if result.table.ablation not in repeated]
    order = [*SUBJECTS, "Other"]
    return sorted(latest, key=lambda result: order.index(_find_subject(result.table.ablation)[0]))


def _is_repetition(table: Table, names: Collection[str]) -> bool:
    """Whether a question has the claim of the one before it: its name and a number, and no phrase of its own."""
    after = _get_declaration(table).after
    own = any(table.ablation in phrases for phrases in SUBJECTS.values())
    return after in names and table.ablation.startswith(f"{after}_") and not own


def _get_declaration(table: Table) -> Declaration:
    assert table.declaration is not None
    return table.declaration


def _build_answers(found: Sequence[QuestionResult]) -> list[Block]:
    """A table per subject, with a line per question."""
    by_name = {result.table.ablation: result.table for result in found}
    header = ("Question", "Claim", "Verdict", "Decided by", "n", "Follows", "Core-hours")
    blocks: list[Block] = []
    for subject, group in groupby(_select_latest(found), key=lambda result: _find_subject(result.table.ablation)[0]):
        rows = tuple(_build_answer(result.table, by_name) for result in group)
        blocks += [Heading(subject, 3), Tabular(header, rows, 6)]
    return blocks


def _build_answer(table: Table, by_name: Mapping[str, Table]) -> tuple[str, ...]:
    declared, verdict = _get_declaration(table), table.verdict
    earlier = by_name.get(declared.after)
    first = "" if earlier is None else f"{declared.after}: {_format_status(earlier)}"
    hours = "" if table.seconds is None else f"{(table.seconds - table.seconds_elsewhere) / 3600:.2f}"
    status = _format_status(table) + (" (exploratory)" if declared.exploratory else "")
    if verdict is None:
        return (table.ablation, declared.claim, status, "", "", first, hours)
    number = f"{verdict.n}, look {len(verdict.looks)} of {len(declared.looks)}" if verdict.looks else str(verdict.n)
    decisive = describe_contrasts(declared, verdict, table.columns_by_key[declared.primary])[_find_decisive(verdict)]
    return (table.ablation, declared.claim, status, decisive, number, first, hours)


def _find_decisive(verdict: Verdict) -> int:
    """The contrast that a verdict turns on: of its status, the one that is farthest from it if the claim is refuted.

    Otherwise the least certain: its mean is the fewest widths of its interval from 0.
    """
    sign = -1 if verdict.status == "refuted" else 1
    agreeing = [i for i, part in enumerate(verdict.parts) if part.status == verdict.status]
    widths = [max(part.high - part.low, LEAST) for part in verdict.parts]
    return min(agreeing, key=lambda i: sign * abs(verdict.parts[i].mean) / widths[i])


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
    "smaller than the margin. Of claims of which a contrast is false, at most 2.5 % are supported in error if outcomes "
    "are normal, and up to 12 % if they are very skewed (docs/results/looks.md). The "
    "interval that shows it is shorter than the simultaneous one that is printed: in the figures it is the thick part.",
    "Refuted: at least one contrast is shown to violate it. A claimed difference is not there by the margin, a claimed "
    "equivalence is off by more than half of it, a statement holds in fewer than three quarters of trainings. Of "
    "claims that hold by the margin, equally few are refuted in error.",
    "Undecided: neither, so far, or after the last look. The details have the probability that a later look decides. "
    "Futile means that none would, if means and spreads stay.",
)
_SCOPE = (
    "All other results in a question's table are exploratory. The models have 50,000 to a million parameters, but for "
    "SmolLM2-135M, a trained one: the results are evidence about the mechanism on these tasks, not about language "
    "models that are trained with it. A question that follows another has other seeds, and sometimes another claim. "
    "Questions with n = 5, and first attempts, were judged by rules that needed too many seeds: their details below "
    "have what those rules said. "
    "Decided by: the contrast on which the verdict turns, with its simultaneous interval. Core-hours: trainings and "
    "evaluations; trainings that two questions share count once. "
    "Written by: lit-lazy ablate verdicts docs/results --out docs/questions.md --readme README.md"
)


def _format_status(table: Table) -> str:
    return "not decided yet" if table.verdict is None else table.verdict.status


def _build_reviewer_table(found: Sequence[QuestionResult]) -> Tabular:
    verdicts: dict[str, list[str]] = {number: [] for number in REVIEWERS}
    for _, table in _select_latest(found):
        source = _get_declaration(table).source + _ALSO_ABOUT.get(table.ablation, "")
        for number in re.findall(r"\bR\d+\b", source):
            verdicts.setdefault(number, []).append(f"{table.ablation}: {_format_status(table)}")
    rows = tuple((n, about, "; ".join(verdicts[n]) or "–", left) for n, (about, left) in REVIEWERS.items())
    return Tabular(("", "Question", "Verdicts on a part of it", "Still open"), rows, 4)


def _build_blocks(result: QuestionResult) -> list[Block]:
    table = result.table
    declared, verdict = _get_declaration(table), table.verdict
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
