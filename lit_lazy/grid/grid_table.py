"""The table of a grid: its spec from the plan, and what the losses of its cells are held against."""

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import mean

from lit_lazy.data import compute_learned_nats, describe_repetition, list_doubts
from lit_lazy.grid.cell_record import CellRecord
from lit_lazy.grid.plan import Plan
from lit_lazy.measure.diagnostic_arrays import SCALARS
from lit_lazy.support.error_messages import did_you_mean
from lit_lazy.support.names_to_paths import find, list_available
from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.columns import COLUMNS, STARTS, list_learned_columns
from lit_lazy.table.records import Observation, RowInfo, Yardstick
from lit_lazy.table.results_table import Table

VERSION = " (version "
"""Between the name of a changed row and the hash of what it trained before."""
VERSION_DIGITS = 6
"""Digits by which a table tells what a changed row trained before and now."""
SPENT = ("time/train_seconds", "time/evaluate_seconds")
"""Metrics of the time that a cell took."""
ALTERNATIVES = ("reference", "chunked", "cpu", "triton")
"""The backends that compute the same attention; others, such as sdpa, belong to other normalisers."""
UNDERTRAINED_BY = 0.3
"""Bits per byte by which the best softmax row must beat the byte-trigram baseline."""


def build_grid_table(plan: Plan, cells: Sequence[CellRecord]) -> Table:
    """The table of a plan's cells."""
    observations = [cell.observe() for cell in cells]
    longest = sorted(cells, key=lambda cell: -cell.tokens)
    repeated = [line for cell in longest if (line := describe_repetition(cell.facts or plan.facts, cell.tokens))]
    warnings = [*list_doubts(plan.facts), *(repeated[:1] or _warn_undertrained(plan, cells))]
    spec = make_table_spec(plan, observations, warnings)
    if spec.yardstick is not None:
        spec = replace(spec, yardstick=add_bounds(spec.yardstick, cells))
    table = build_table(spec, observations)
    taken = [cell for cell in cells if cell.result is not None and cell.result.taken_from]
    return replace(table, seconds=_sum_seconds(cells), seconds_elsewhere=_sum_seconds(taken) or 0.0)


def make_table_spec(plan: Plan, observations: Sequence[Observation], warnings: Sequence[str]) -> TableSpec:
    """The spec of a plan's table, given its cells."""
    rows = [replace(row, seeds=tuple(s for s in row.seeds if str(s) in plan.get_keys(row))) for row in plan.rows]
    rows = [row for row in rows if row.seeds] if plan.keys else plan.rows  # former plans have no keys
    variants = {row.variant for row in rows}
    measured = {name for observation in observations for name in observation.metrics}
    columns = [*plan.columns, *list_learned_columns(measured)]
    if len({observation.metrics.get("init/tau/mean") for observation in observations}) < 2:  # all start alike
        columns = [replace(c, by_construction="") if c.by_construction == STARTS else c for c in columns]
    # Metrics that some models or data lack are left out silently.
    known = measured | {column.key for column in COLUMNS} | SCALARS.keys()
    absent = [
        f"{column.key!r}{did_you_mean(column.key, measured)}"
        for column in columns
        if measured and column.key.removeprefix("init/") not in known
    ]
    left_out = [f"Left out, as no cell reports them: {', '.join(absent)}."] if absent else []
    versions = {name: f"version {plan.definitions[name][:VERSION_DIGITS]}" for name in plan.replaced.values()}
    fix = "run it too, or name another by --baseline"
    lacking = f"No differences: the baseline, {plan.baseline}, is not among the rows; {fix}."
    alone = [] if plan.baseline in variants else [lacking]
    return TableSpec(
        ablation=plan.ablation,
        base=plan.base,
        baseline="" if alone else plan.baseline,
        rows=tuple(add_note(row, versions.get(row.variant, "")) for row in rows),
        # Columns of other data sources (bits per byte, trigger accuracy) have no value in any cell.
        columns=tuple(column for column in columns if column.key in measured or not measured),
        contrasts=tuple(contrast for contrast in plan.contrasts if set(contrast.weights) <= variants),
        command=plan.command,
        labels=("backend",),
        alternatives={"backend": ALTERNATIVES, "torch": None, "python": None},
        warnings=[*warnings, *left_out, *alone],
        primary=plan.primary,
        declaration=plan.declaration,
        yardstick=make_yardstick(plan.facts, describe_larger(plan.base)),
        files=plan.files,
    )


def name_version(variant: str, definition: str) -> str:
    """The name of the row that keeps a row's cells from before it changed. definition: hash of what they train."""
    return f"{variant}{VERSION}{definition[:VERSION_DIGITS]})"


def add_note(row: RowInfo, note: str) -> RowInfo:
    """A row with a note added to its own."""
    return replace(row, note="; ".join(filter(None, (row.note, note))))


def make_yardstick(facts: Mapping[str, str | int | float], remedy: str = "") -> Yardstick | None:
    """What the losses of cells on these data are held against; None if the facts lack the marks."""
    learned = compute_learned_nats(facts)
    if learned is None:
        return None
    if "optimum_nats" not in facts:
        marks = {name: float(facts[f"{name}_bits_per_byte"]) for name in ("trigram", "unigram")}
        bits = learned / math.log(2) / float(facts["bytes_per_token"])
        return Yardstick("loss/bits_per_byte", bits, marks, remedy)
    optimum, chance = float(facts["optimum_nats"]), float(facts["chance_nats"])
    return Yardstick("loss/excess", learned - optimum, {"optimum": 0.0, "chance": chance - optimum}, remedy)


def add_bounds(yardstick: Yardstick, cells: Iterable[CellRecord]) -> Yardstick:
    """The yardstick with the bounds of the rows whose data differ from the experiment's."""
    by_row: dict[str, float | None] = {}
    for cell in cells:
        own = make_yardstick(cell.facts)
        bound = own.learned if own is not None and own.metric == yardstick.metric else None
        if cell.facts and bound != yardstick.learned:
            by_row[cell.variant] = bound
    return replace(yardstick, by_row=by_row)


def describe_larger(base: str) -> str:
    """What the experiment is whose few steps a tiny one runs; "" of another, which might learn in more steps.

    base: the tiny one's name, with or without overrides. Its files say how long a training takes.
    """
    task, tiny, _ = base.partition("_tiny")
    with suppress(OSError, SyntaxError, ValueError):  # of a user's file, which is not run here
        for name in (f"{task}_small", task) if tiny else ():
            if name in list_available("experiments"):
                text = find("experiments", name).read_text(encoding="utf-8")
                about, *_ = (ast.get_docstring(ast.parse(text)) or "another size").splitlines()
                return f"--base {name} shows more: {about}"
    return ""


def _sum_seconds(cells: Sequence[CellRecord]) -> float | None:
    spent = [cell.metrics[name] for cell in cells for name in SPENT if name in cell.metrics]
    return sum(spent) if spent else None


def _warn_undertrained(plan: Plan, cells: Sequence[CellRecord]) -> list[str]:
    """Warn if the best softmax row does not clearly beat the trigram baseline."""
    if "trigram_bits_per_byte" not in plan.facts:
        return []
    trigram, losses = float(plan.facts["trigram_bits_per_byte"]), dict[str, list[float]]()
    for cell in cells:
        alike = cell.facts.get("trigram_bits_per_byte", trigram) == trigram
        if alike and cell.normaliser == "Softmax" and "loss/bits_per_byte" in cell.metrics:
            losses.setdefault(cell.variant, []).append(cell.metrics["loss/bits_per_byte"])
    if not losses:
        return [f"no softmax row to hold against the byte-trigram baseline of {trigram:.3f} bits/byte"]
    reached, row = min((mean(values), row) for row, values in losses.items())
    if reached <= trigram - UNDERTRAINED_BY:
        return []
    return [
        f"UNDERTRAINED: {row!r} reaches {reached:.3f} bits/byte; {trigram - UNDERTRAINED_BY:.3f} would be "
        f"{UNDERTRAINED_BY} below the byte-trigram baseline of {trigram:.3f}. Differences below may not outlast a "
        "longer training"
    ]
