"""Verdicts on the claim of a declared question.

All functions are pure in the declaration and the values of a table, so table.json is enough to compute a verdict.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from lit_lazy.table.columns import Column
from lit_lazy.table.declaration import BY_STATEMENT, Declaration, Finding, Look, Verdict
from lit_lazy.table.sequential_looks import (
    ALPHA,
    Failures,
    Outcomes,
    combine_statuses,
    compute_chances,
    compute_support_interval,
    find_open_rows,
    is_futile,
    judge_looks,
)
from lit_lazy.table.statistics import drop_rounding


def judge(declaration: Declaration, column: Column, outcomes: Outcomes, failures: Failures) -> Verdict | None:
    """The verdict on outcomes; None while a row of a contrast lacks one in a seed of the first look.

    column: of the primary outcome.
    """
    if find_missing_seeds(declaration, outcomes):
        return None
    looks = judge_looks(declaration, outcomes, failures)
    thresholds = _format_thresholds(declaration, column)
    looks = tuple(
        replace(look, parts=tuple(replace(part, why=part.why.format(**thresholds)) for part in look.parts))
        for look in looks
    )
    n, parts = looks[-1].n, looks[-1].parts
    verdict = Verdict(combine_statuses(parts), "", n, parts, declaration.exploratory, looks)
    if verdict.status == "undecided" and len(looks) < len(declaration.looks):
        futile = is_futile(declaration, looks, outcomes, failures)
        verdict = replace(verdict, futile=futile, chances=compute_chances(declaration, looks, outcomes, failures))
    made, planned = len(looks), len(declaration.looks)
    at = f" at look {made} of {planned}" if planned > 1 else ""
    agreeing = sum(part.status == verdict.status for part in parts)
    count = f", {agreeing} of {len(parts)} contrasts {verdict.status}" if len(parts) > 1 else ""
    text = f"{verdict.status.capitalize()}{at} (n = {n}{count}): {declaration.claim}"
    if verdict.futile:
        text += " Futile to continue: if means and spreads stay, no look that is left decides it."
    elif verdict.chances:
        text += f" {describe_chances(verdict)}."
    if verdict.exploratory:
        text += f" Exploratory: {'; '.join(verdict.exploratory)}."
    return replace(verdict, sentence=text)


def describe_missing(declaration: Declaration, outcomes: Outcomes, looks: Sequence[Look] = ()) -> str:
    """Describe what the look after `looks` still needs. outcomes: {} if no cell has measured any."""
    if not outcomes:
        return f"No cell has measured its primary outcome, {declaration.primary}."
    missing = find_missing_seeds(declaration, outcomes, looks)
    row, seeds = next(iter(missing.items()))
    others = f" ({len(missing)} rows lack some)" if len(missing) > 1 else ""
    needed, which = declaration.looks[len(looks)], f"Look {len(looks) + 1}" if looks else "Its first look"
    return f"{which} needs each of {needed} seeds: {row} lacks {', '.join(map(str, seeds))}{others}."


def find_missing_seeds(
    declaration: Declaration, outcomes: Outcomes, looks: Sequence[Look] = ()
) -> dict[str, list[int]]:
    """Seeds without a primary outcome, by row, that the look after `looks` needs."""
    seeds, rows = declaration.seeds[: declaration.looks[len(looks)]], find_open_rows(declaration, looks)
    lacking = {row: [seed for seed in seeds if seed not in outcomes.get(row, {})] for row in rows}
    return {row: seeds for row, seeds in lacking.items() if seeds}


def _format_thresholds(declaration: Declaration, column: Column) -> dict[str, str]:
    """The thresholds of the rules by name: the margin in the unit of differences, the levels in that of values."""
    margin = declaration.margin
    differences = {"margin": margin, "half_margin": margin / 2}
    levels = {"removed": declaration.removed, "kept": declaration.kept}
    return {
        name: f"{value * column.scale:g} {unit}".rstrip()
        for values, unit in ((differences, column.difference_unit), (levels, column.unit))
        for name, value in values.items()
    }


def describe_bounds(declaration: Declaration, column: Column) -> tuple[str, ...]:
    """Describe the thresholds of the declaration's rule; () if its statements have them."""
    if declaration.statements:
        return ()
    levels = declaration.rule == "removed"
    texts = ("removed below {removed}", "there above {kept}") if levels else ("margin {margin}",)
    return tuple(text.format(**_format_thresholds(declaration, column)) for text in texts)


def describe_contrasts(declaration: Declaration, verdict: Verdict, column: Column) -> list[str]:
    """Describe the finding of each contrast."""
    stated = {statement.name: f" ({statement})" for statement in declaration.statements}
    number, unit = _choose_format(declaration, column)
    lines = []
    for part in verdict.parts:
        interval = format_interval(part.mean, part.low, part.high, number)
        if len(declaration.contrasts) > 1 and part.status != "refuted":  # the shorter one for support
            low, high = compute_support_interval(declaration, part)
            interval += f", for support [{number(low)}, {number(high)}]"
        seeds = "" if part.n == verdict.n else f" (n = {part.n})"
        lines.append(f"{part.name}{stated.get(part.name, '')}: {part.status}, {part.why}: {interval}{unit}{seeds}")
    return lines


def format_finding(declaration: Declaration, part: Finding, column: Column) -> str:
    """The mean of a contrast with the interval that decided it: that for support, or the simultaneous one."""
    number, unit = _choose_format(declaration, column)
    supported = part.status == "supported"
    ends = compute_support_interval(declaration, part) if supported else (part.low, part.high)
    return format_interval(part.mean, *ends, number) + unit


def _choose_format(declaration: Declaration, column: Column) -> tuple[Callable[[float], str], str]:
    """How a contrast's numbers are written, and their unit with a leading space."""
    if declaration.rule in BY_STATEMENT:
        return "{:.2f}".format, ""
    return partial(column.format, sign="+"), f" {column.difference_unit}" if column.unit else ""


def format_interval(mean: float, low: float, high: float, number: Callable[[float], str]) -> str:
    """A mean and its interval; the interval's half-width if it vanishes in the digits of `number`."""
    half_width = (high - low) / 2
    shown, least, most = map(number, (drop_rounding(mean, half_width), low, high))
    return f"{shown} ± {half_width:.1g}" if least == most and half_width else f"{shown} [{least}, {most}]"


def describe_looks(declaration: Declaration, verdict: Verdict) -> list[str]:
    """Describe each look: the error rate spent so far, and what is open after it."""
    lines = []
    for number, look in enumerate(verdict.looks, start=1):
        spent = ALPHA * look.n / declaration.looks[-1]
        left = [part.name for part in look.parts if part.status == "undecided"]
        state = f"open: {', '.join(left)}" if left else "nothing open"
        lines.append(f"look {number} of {len(declaration.looks)}: n = {look.n}, alpha spent {spent:.4g}, {state}")
    return lines


def describe_earlier(declaration: Declaration) -> str:
    """Describe the earlier question on the same claim."""
    if not declaration.earlier:
        return f"Asked after {declaration.after}, whose verdict is not known here."
    if declaration.claim in declaration.earlier:
        return f"Second attempt, with other seeds. The first, {declaration.after}: {declaration.earlier}"
    return f"Asked with other seeds after {declaration.after}, whose claim reads otherwise: {declaration.earlier}"


def describe_chances(verdict: Verdict) -> str:
    """The probabilities that the looks that are left decide an open claim."""
    listed = ", ".join(f"{chance.supported + chance.refuted:.2f} by n = {chance.n}" for chance in verdict.chances)
    return f"Probability that it is decided: {listed}"
