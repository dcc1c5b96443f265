"""A grid's folder is its record: the plan of an ablation, its cells, and the table of both."""

import ast
import json
import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from glob import escape
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from lit_lazy.config.serialisation import flatten
from lit_lazy.data import compute_learned_nats, describe_repetition, list_doubts
from lit_lazy.grid.plan import PLAN, Plan
from lit_lazy.measure.diagnostic_arrays import SCALARS
from lit_lazy.support.errors import did_you_mean, one_line, sanitise
from lit_lazy.support.names_to_paths import find, list_available
from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.columns import COLUMNS, STARTS, list_learned_columns
from lit_lazy.table.records import Observation, RowInfo, Table, Yardstick
from lit_lazy.training.run_folder import CELLS, RunResult, is_locked, locate_cell, read_failure, read_settings

VERSION_DIGITS = 6
"""Digits by which a table tells what a changed row trained before and now."""
ASIDE = ".until-"
"""In the names of folders that `--fresh` has moved aside."""
SPENT = ("time/train_seconds", "time/evaluate_seconds")
"""Metrics of the time that a cell took."""
ALTERNATIVES = ("reference", "chunked", "cpu", "triton")
"""The backends that compute the same attention; others, such as sdpa, belong to other normalisers."""
UNDERTRAINED_BY = 0.3
"""Bits per byte by which the best softmax row must beat the byte-trigram baseline."""
QUEUE = "queue.db"
"""File in the runs folder, in which versions before plan.json was kept in a grid's folder had its cells."""
CELLS_OF_GRID = (
    "SELECT a.value_json FROM trial_user_attributes a JOIN trials t ON t.trial_id = a.trial_id "
    "JOIN studies s ON s.study_id = t.study_id WHERE a.key = 'cell' AND s.study_name = ?"
)


class DamagedPlanError(ValueError):
    """The file of a plan cannot be read."""

    def __init__(self, file: Path, why: str) -> None:
        super().__init__(f"{str(file)!r}: is damaged ({why}); run the grid's command again to rewrite it")
        self.file = file


@dataclass(frozen=True)
class CellRecord:
    """What a grid's folder holds of one cell of its plan."""

    variant: str
    seed: int
    key: str
    folder: Path
    """The run folder."""
    axes: Mapping[str, str]
    """Values of the plan's axes by name."""

    @cached_property
    def result(self) -> RunResult | None:
        """The result of a finished training."""
        return RunResult.peek(self.folder)

    @property
    def facts(self) -> dict[str, str | int | float]:
        """What its data source says of itself; {} without a result."""
        return {} if self.result is None else self.result.data

    @cached_property
    def status(self) -> Literal["complete", "failed", "running", "waiting"]:
        if self.result is not None:
            return "complete"
        if self.reason:
            return "failed"
        return "running" if is_locked(self.folder) else "waiting"

    @cached_property
    def reason(self) -> str:
        """Why its last training failed; "" if it did not."""
        return read_failure(self.folder)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The canonical config by dotted path; none before the training began."""
        config = self.result.config if self.result is not None else read_settings(self.folder)
        return flatten(config)

    @property
    def metrics(self) -> dict[str, float]:
        """Of a finished training, its timings as `time/NAME` included."""
        result = self.result
        return {} if result is None else {**result.metrics, **{f"time/{k}": v for k, v in result.timings.items()}}

    @property
    def tokens(self) -> int:
        """How many its training sees; 0 before it began, and of a task whose sequences have no set length."""
        shape = "train.steps", "train.batch_size", "data.context_length"
        return math.prod(int(self.settings.get(path, 0)) for path in shape)

    @property
    def normaliser(self) -> str:
        """Class name of the normaliser, or of the mixer if that is not attention; "" before the training began."""
        mixer = str(self.settings.get("model.mixer", "SelfAttention"))
        return str(self.settings.get("model.attention.normaliser", "")) if mixer == "SelfAttention" else mixer

    def observe(self) -> Observation:
        """The cell as a table takes it."""
        result = self.result
        if result is None:
            return Observation(self.variant, self.seed, self.status, reason=self.reason)
        return Observation(
            variant=self.variant,
            seed=self.seed,
            status=self.status,
            metrics=self.metrics,
            labels={**result.environment, **result.labels},
            normaliser=self.normaliser,
            position=str(self.settings.get("model.position", "")),
            git_sha=result.environment["git_sha"],
            environment=result.made_in,
            taken_from=result.taken_from,
        )


@dataclass(frozen=True)
class GridFolder:
    """A grid's folder, which is the record of the grid: its plan, and its cells by row and seed."""

    path: Path
    plan: Plan

    @property
    def title(self) -> str:
        """Its name, and the experiment's overrides that a name cannot hold."""
        named = self.path.name.startswith(f"{self.plan.ablation}-{self.plan.base}")
        return sanitise(self.path.name if named else f"{self.path.name} ({self.plan.base})")

    @classmethod
    def read(cls, path: Path) -> "GridFolder | None":
        """The grid in a folder; None if it has no plan. Raises a one-line ValueError if the plan is damaged."""
        file = path / PLAN
        former = None if file.exists() else find_former_plan(path)
        file = former or file
        if not file.exists():
            return None
        try:
            plan = Plan.from_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DamagedPlanError(file, one_line(error)) from None
        return cls(path, plan if former is None else add_queued_keys(plan, path))

    @cached_property
    def cells(self) -> list[CellRecord]:
        """The cells that the plan asks for and whose keys it has."""
        plan = self.plan
        return [
            CellRecord(row.variant, seed, key, locate_cell(self.path, key), plan.axis_values.get(row.variant, {}))
            for row in plan.rows
            for seed in row.seeds
            if (key := plan.get_keys(row).get(str(seed)))
        ]

    def build_table(self) -> Table:
        """The table of the plan's cells."""
        plan, observations = self.plan, [cell.observe() for cell in self.cells]
        longest = sorted(self.cells, key=lambda cell: -cell.tokens)
        repeated = [line for cell in longest if (line := describe_repetition(cell.facts or plan.facts, cell.tokens))]
        warnings = [*list_doubts(plan.facts), *(repeated[:1] or _warn_undertrained(plan, self.cells))]
        spec = make_table_spec(plan, observations, warnings)
        if spec.yardstick is not None:
            spec = replace(spec, yardstick=add_bounds(spec.yardstick, self.cells))
        table = build_table(spec, observations)
        taken = [cell for cell in self.cells if cell.result is not None and cell.result.taken_from]
        return replace(table, seconds=_sum_seconds(self.cells), seconds_elsewhere=_sum_seconds(taken) or 0.0)


def read_grid(folder: Path) -> GridFolder:
    """The grid in a folder. Raises a one-line ValueError if it has none."""
    grid = GridFolder.read(folder)
    if grid is None:
        raise ValueError(f"{str(folder)!r}: has no {PLAN}; `lit-lazy ablate run` makes it")
    return grid


def list_grids(runs: Path) -> list[str]:
    """Names of the grids in a runs folder, without those that `--fresh` moved aside."""
    folders = [folder for folder in runs.iterdir() if ASIDE not in folder.name] if runs.is_dir() else []
    return sorted(folder.name for folder in folders if (folder / PLAN).exists() or find_former_plan(folder))


def find_former_plan(folder: Path) -> Path | None:
    """The plan of a grid that a version before plan.json was kept in the grid's folder began: an artifact of MLflow's.

    None if no such version trained cells there.
    """
    if not ((folder / CELLS).is_dir() and (folder.parent / QUEUE).exists()):
        return None
    from lit_lazy.tracking.store_address import ARTIFACTS

    found = (folder.parent / ARTIFACTS).glob(f"{escape(folder.name)}/*/artifacts/{PLAN}")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def add_queued_keys(plan: Plan, folder: Path) -> Plan:
    """Such a plan with the keys and axes of its cells, which the queue in the runs folder has.

    Raises a one-line ValueError if the queue is damaged.
    """
    keys: dict[str, dict[str, str]] = {}
    axes: dict[str, dict[str, str]] = {}
    queue = folder.parent / QUEUE
    try:
        with closing(sqlite3.connect(f"{queue.resolve().as_uri()}?mode=ro", uri=True)) as database:
            cells = [json.loads(text) for (text,) in database.execute(CELLS_OF_GRID, (folder.name,))]
    except sqlite3.Error as error:
        raise ValueError(f"{str(queue)!r}: cannot be read ({error}); move it away to begin another") from None
    for cell in cells:
        keys.setdefault(cell["variant"], {})[str(cell["seed"])] = cell["key"]
        axes[cell["variant"]] = cell["axes"]
    return replace(plan, keys=keys, axis_values=axes)


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
    return f"{variant} (version {definition[:VERSION_DIGITS]})"


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
