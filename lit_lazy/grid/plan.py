"""A grid's folder is its record: the plan of an ablation, its cells, and the table of both."""

import ast
import json
import math
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from glob import escape
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

from lit_lazy.config.serialisation import flatten
from lit_lazy.data import compute_learned_nats, list_doubts
from lit_lazy.measure.arrays import SCALARS
from lit_lazy.support.errors import did_you_mean, one_line, sanitise
from lit_lazy.support.locks import read_id
from lit_lazy.support.named_files import find, list_available
from lit_lazy.support.stored_records import make_record, parse_record
from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.columns import COLUMNS, STARTS, list_learned_columns
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.records import Column, Contrast, Observation, RowInfo, Table, Yardstick
from lit_lazy.table.verdicts import add_verdict
from lit_lazy.training.result import RunResult
from lit_lazy.training.run_folder import CELLS, is_locked, locate_cell, read_failure, read_settings

if TYPE_CHECKING:
    from lit_lazy.grid.ablation import Cell

PLAN = "plan.json"
"""File in a grid's folder."""
ASIDE = ".until-"
"""In the names of folders that `--fresh` has moved aside."""
GRID_ID = "grid_id"
"""File in a grid's folder, with the tag `grid` of its parent run."""
SPENT = ("time/train_seconds", "time/evaluate_seconds")
"""Metrics of the time that a cell took."""
ALTERNATIVES = ("reference", "chunked", "cpu", "triton")
"""The backends that compute the same attention; others, such as sdpa, belong to other normalisers."""
THEN = ", then "
"""Between the commands of a plan."""
FORMAT = 5
"""Format of the plan; raised when a field is added, removed or changes its meaning."""
UNDERTRAINED_BY = 0.3
"""Bits per byte by which the best softmax row must beat the byte-trigram baseline."""

GONE = "was removed from the ablation"
MOST_CHANGES = 3
"""Changed settings that a message shows."""
VERSION_DIGITS = 6
"""Digits by which a table tells what a changed row trained before and now."""
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


class ChangedRowError(ValueError):
    """Rows of a grid that has begun would train something else. changes: what changed, by row."""

    def __init__(self, changes: Mapping[str, str]) -> None:
        (variant, change), *others = changes.items()
        also = f" (also changed: {', '.join(repr(name) for name, _ in others)})" if others else ""
        beside = "" if GONE in changes.values() else "--changed trains it anew and keeps its former cells beside, "
        super().__init__(
            f"row {variant!r}: {change} since this grid began{also}; {beside}another name= in the ablation keeps both "
            "and takes the results of other rows, --fresh moves all former results away"
        )


def name_version(variant: str, definition: str) -> str:
    """The name of the row that keeps a row's cells from before it changed. definition: hash of what they train."""
    return f"{variant} (version {definition[:VERSION_DIGITS]})"


def describe_changes(former: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Which settings of a row changed: `train.steps changed from 6 to 8`; '' if none did.

    former: of an earlier cell, by dotted path. config: in canonical form. What only one of them has belongs to
    a class that changed, or is a field of another version; another path of the same weights changes nothing.
    """
    now = {path: str(value) for path, value in flatten(config).items() if path not in ("seed", "init_from")}
    changed = [path for path, value in now.items() if str(former.get(path, value)) != value]
    more = f" and {len(changed) - MOST_CHANGES} more" if len(changed) > MOST_CHANGES else ""
    return ", ".join(f"{path} changed from {former[path]} to {now[path]}" for path in changed[:MOST_CHANGES]) + more


@dataclass(frozen=True)
class Plan:
    """Everything a table needs apart from the results of the cells."""

    ablation: str
    base: str
    baseline: str
    command: str
    """The commands that asked for rows or seeds, or declared something else, in their order."""
    rows: tuple[RowInfo, ...]
    """The rows requested so far; in plans of format 2 also the baseline, without keys."""
    columns: tuple[Column, ...]
    contrasts: tuple[Contrast, ...]
    axes: tuple[str, ...]
    """Names of the params in which the cells differ."""
    definitions: dict[str, str]
    """Hash of what each row of the ablation trains, by name."""
    facts: dict[str, str | int | float]
    """Facts about the data: oracle, baselines, sizes."""
    schema: int
    """`lit_lazy.config.key.SCHEMA` of the cells' keys."""
    declaration: Declaration | None = None
    """The declaration of the question that the ablation answers, if any."""
    primary: tuple[str, ...] = ()
    """As in `Ablation`."""
    files: dict[str, str] = field(default_factory=dict)
    """Hashes of the user's files that are in no commit, by name."""
    keys: dict[str, dict[str, str]] = field(default_factory=dict)
    """Keys of the cells requested so far, by row and seed; none in plans of format 2."""
    axis_values: dict[str, dict[str, str]] = field(default_factory=dict)
    """Values of the axes, by row; none in plans of format 2."""
    config: dict[str, Any] = field(default_factory=dict)
    """The config of the experiment; none in plans of format 2."""
    replaced: dict[str, str] = field(default_factory=dict)
    """Rows of cells from before a change, and the rows that trained anew after it; none in plans before format 4."""
    format: int = FORMAT

    def to_json(self) -> str:
        declared = None if self.declaration is None else self.declaration.to_json()
        return json.dumps(asdict(self) | {"declaration": declared}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Parse a plan.

        Raises a one-line ValueError if the text is none, NewerFormatError if a newer version wrote it.
        """
        return parse_record(text, PLAN, "plan", FORMAT, partial(make_record, cls))

    def make_table_spec(self, observations: Sequence[Observation], warnings: Sequence[str]) -> TableSpec:
        """The spec of the plan's table, given its cells."""
        rows = [replace(row, seeds=tuple(s for s in row.seeds if str(s) in self.get_keys(row))) for row in self.rows]
        rows = [row for row in rows if row.seeds] if self.keys else self.rows  # former plans have no keys
        variants = {row.variant for row in rows}
        measured = {name for observation in observations for name in observation.metrics}
        columns = [*self.columns, *list_learned_columns(measured)]
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
        versions = {name: f"version {self.definitions[name][:VERSION_DIGITS]}" for name in self.replaced.values()}
        fix = "run it too, or name another by --baseline"
        lacking = f"No differences: the baseline, {self.baseline}, is not among the rows; {fix}."
        alone = [] if self.baseline in variants else [lacking]
        return TableSpec(
            ablation=self.ablation,
            base=self.base,
            baseline="" if alone else self.baseline,
            rows=tuple(_add_note(row, versions.get(row.variant, "")) for row in rows),
            # Columns of other data sources (bits per byte, trigger accuracy) have no value in any cell.
            columns=tuple(column for column in columns if column.key in measured or not measured),
            contrasts=tuple(contrast for contrast in self.contrasts if set(contrast.weights) <= variants),
            command=self.command,
            labels=("backend",),
            alternatives={"backend": ALTERNATIVES, "torch": None, "python": None},
            warnings=[*warnings, *left_out, *alone],
            primary=self.primary,
            declaration=self.declaration,
            yardstick=make_yardstick(self.facts, describe_larger(self.base)),
            files=self.files,
        )

    def get_keys(self, row: RowInfo) -> dict[str, str]:
        """The keys of a row's cells by seed."""
        return self.keys.get(row.variant, {})

    def merge(
        self,
        former: "Plan",
        order: Sequence[str],
        find_changes: Callable[[str], str],
        finished: Collection[str] | None = None,
    ) -> "Plan":
        """This plan with the rows and seeds of a former plan added; rows follow `order`.

        find_changes: says what changed in a row, "" if not its trainings. finished: keys of the former plan's finished
        cells, which stay beside those of rows whose trainings have changed; None to refuse such rows.

        Raises ValueError if the trainings of rows have changed: a table must not mix the two.
        """
        if self.schema != former.schema:
            raise ValueError(
                f"{self.ablation} on {self.base}: was begun by another version of lit-lazy, whose cells have other "
                "keys; --fresh moves its results away, another --runs folder keeps both; `lit-lazy ablate table` still "
                "shows them"
            )
        changes = self._collect_changes(former, order, find_changes)
        if changes and (finished is None or GONE in changes.values()):
            raise ChangedRowError(changes)
        untrained = changes.keys() - self.keys.keys()  # stay what they were
        definitions = self.definitions | {name: former.definitions.get(name, "") for name in untrained}
        former = former._set_aside(changes, self, finished or ())
        order = [name for row in order for name in (row, *(old for old, new in former.replaced.items() if new == row))]
        rows, command = {row.variant: row for row in former.rows}, former.command
        adds = self.declaration is not None and self.declaration.digest != getattr(former.declaration, "digest", None)
        for row in self.rows:
            known = rows.get(row.variant, replace(row, seeds=()))
            rows[row.variant] = replace(row, seeds=tuple(sorted({*row.seeds, *known.seeds})))
            adds |= rows[row.variant].seeds != known.seeds
        if adds and self.command not in command.split(THEN):
            command += THEN + self.command
        axes = tuple(dict.fromkeys([*former.axes, *self.axes]))
        return replace(
            self,
            command=command,
            rows=tuple(rows[name] for name in order if name in rows),
            axes=axes,
            definitions=definitions,
            replaced=former.replaced,
            declaration=self._merge_declaration(former.declaration),
            keys={name: former.keys.get(name, {}) | self.keys.get(name, {}) for name in order if name in rows},
            # A row's values stay: MLflow takes new ones only.
            axis_values={name: self.axis_values.get(name, {}) | former.axis_values.get(name, {}) for name in rows},
        )

    def _collect_changes(
        self, former: "Plan", order: Sequence[str], find_changes: Callable[[str], str]
    ) -> dict[str, str]:
        """What changed in each row of a former plan that was not set aside. Raises ValueError if one was renamed."""
        named = {definition: name for name, definition in self.definitions.items()}
        changes: dict[str, str] = {}
        for row in (row for row in former.rows if row.variant not in former.replaced):
            renamed = named.get(former.definitions.get(row.variant, ""))
            if row.variant not in self.definitions and renamed is not None:
                raise ValueError(
                    f"row {row.variant!r}: is named {renamed!r} now; another name of the ablation takes the finished "
                    "cells over, --fresh moves them away"
                )
            if row.variant not in order:
                changes[row.variant] = GONE
            elif self.definitions.get(row.variant) != former.definitions.get(row.variant) and (
                change := find_changes(row.variant)
            ):
                changes[row.variant] = change
        return changes

    def _set_aside(self, changes: Mapping[str, str], now: "Plan", finished: Collection[str]) -> "Plan":
        """This plan with the finished cells of changed rows, of those that `now` trains, in rows of other names.

        A row that was set aside and is again what the ablation defines gets its name back.
        """
        names: dict[str, str] = {}
        for variant in changes.keys() & now.keys.keys():
            names[variant] = name_version(variant, self.definitions.get(variant, ""))
            names[name_version(variant, now.definitions[variant])] = variant
        rows: dict[str, RowInfo] = {}
        keys, axis_values, replaced = {}, {}, {}
        for row in self.rows:
            known, name = self.get_keys(row), names.get(row.variant, row.variant)
            if row.variant in changes and name != row.variant:
                known = {seed: key for seed, key in known.items() if key in finished}
                if not known:
                    continue
                row = _add_note(replace(row, seeds=tuple(sorted(map(int, known)))), f"before {changes[row.variant]}")
                replaced[name] = row.variant
            elif row.variant in self.replaced and name == row.variant:
                replaced[name] = self.replaced[name]
            rows[name] = replace(row, variant=name)
            keys[name], axis_values[name] = known, self.axis_values.get(row.variant, {})
        return replace(self, rows=tuple(rows.values()), keys=keys, axis_values=axis_values, replaced=replaced)

    def _merge_declaration(self, former: Declaration | None) -> Declaration | None:
        """The declaration with its commit at the beginning of the grid, or marked as changed since.

        A change that was committed later does not make up for a beginning without a commit. One that was undone counts
        no more.
        """
        now = self.declaration
        if now is None:
            return None
        if former is not None and former.digest == now.digest:
            return former
        digest, commit = ("", "") if former is None else former.begun or (former.digest, former.commit)
        seen = former is not None and former.seen
        if digest == now.digest:
            return replace(now, commit=commit, seen=seen)
        return replace(now, changed=True, begun=(digest, commit), seen=seen, commit=now.commit if commit else "")


def _add_note(row: RowInfo, note: str) -> RowInfo:
    return replace(row, note="; ".join(filter(None, (row.note, note))))


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


def find_former_plan(folder: Path) -> Path | None:
    """The plan of a grid that a version before plan.json was kept in the grid's folder began: an artifact of MLflow's.

    None if no such version trained cells there.
    """
    if not ((folder / CELLS).is_dir() and (folder.parent / QUEUE).exists()):
        return None
    from lit_lazy.tracking.store import ARTIFACTS

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
        warnings = [*list_doubts(plan.facts), *_warn_undertrained(plan, self.cells)]
        table = build_table(plan.make_table_spec(observations, warnings), observations)
        taken = [cell for cell in self.cells if cell.result is not None and cell.result.taken_from]
        table = replace(table, seconds=_sum_seconds(self.cells), seconds_elsewhere=_sum_seconds(taken) or 0.0)
        return add_verdict(table, plan.declaration)


def read_grid(folder: Path) -> GridFolder:
    """The grid in a folder. Raises a one-line ValueError if it has none."""
    grid = GridFolder.read(folder)
    if grid is None:
        raise ValueError(f"{str(folder)!r}: has no {PLAN}; `lit-lazy ablate run` makes it")
    return grid


def read_grid_id(folder: Path) -> str:
    """The random id of a grid's folder."""
    return read_id(folder / GRID_ID)


def list_grids(runs: Path) -> list[str]:
    """Names of the grids in a runs folder, without those that `--fresh` moved aside."""
    folders = [folder for folder in runs.iterdir() if ASIDE not in folder.name] if runs.is_dir() else []
    return sorted(folder.name for folder in folders if (folder / PLAN).exists() or find_former_plan(folder))


def group_keys(cells: "Iterable[Cell]") -> dict[str, dict[str, str]]:
    """The keys of cells by row and seed."""
    keys: dict[str, dict[str, str]] = {}
    for cell in cells:
        keys.setdefault(cell.variant, {})[str(cell.seed)] = cell.key
    return keys


def _sum_seconds(cells: Sequence[CellRecord]) -> float | None:
    spent = [cell.metrics[name] for cell in cells for name in SPENT if name in cell.metrics]
    return sum(spent) if spent else None


def _warn_undertrained(plan: Plan, cells: Sequence[CellRecord]) -> list[str]:
    """Warn if the best softmax row does not clearly beat the trigram baseline."""
    if "trigram_bits_per_byte" not in plan.facts:
        return []
    trigram, losses = float(plan.facts["trigram_bits_per_byte"]), dict[str, list[float]]()
    for cell in cells:
        if cell.normaliser == "Softmax" and "loss/bits_per_byte" in cell.metrics:
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
