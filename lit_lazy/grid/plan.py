"""The plan of an ablation, stored with its MLflow parent run, and the table built from MLflow."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from lit_lazy.data.base import compute_learned_nats, list_doubts
from lit_lazy.grid.changed_rows import GONE, ChangedRowError
from lit_lazy.measure.arrays import SCALARS
from lit_lazy.support.errors import describe_exception, did_you_mean, one_line
from lit_lazy.support.formats import parse_json, require_known_format
from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.columns import COLUMNS, STARTS
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.records import Column, Contrast, Observation, RowInfo, Table, Yardstick
from lit_lazy.table.verdicts import add_verdict
from lit_lazy.tracking.archive import open_readable
from lit_lazy.tracking.links import list_experiment_names
from lit_lazy.tracking.store import check_store, default_uri
from lit_lazy.tracking.tracker import TrackedRun, Tracker
from lit_lazy.tracking.views import get_normaliser_name

PLAN = "plan.json"
GRID_ID = "grid_id"
"""File in a grid's folder, with the tag `grid` of its parent run."""
SPENT = ("time/train_seconds", "time/evaluate_seconds")
"""Metrics of the time that a cell took."""
ALTERNATIVES = ("reference", "chunked", "cpu", "triton")
"""The backends that compute the same attention; others, such as sdpa, belong to other normalisers."""
THEN = ", then "
"""Between the commands of a plan."""
FORMAT = 2
"""Format of the plan; raised when a field is added, removed or changes its meaning."""
UNDERTRAINED_BY = 0.3
"""Bits per byte by which the best softmax row must beat the byte-trigram baseline."""


@dataclass(frozen=True)
class Plan:
    """Everything a table needs apart from the results of the cells."""

    ablation: str
    base: str
    baseline: str
    command: str
    """The commands that asked for rows or seeds, or declared something else, in their order."""
    rows: tuple[RowInfo, ...]
    """The rows requested so far, and the baseline."""
    columns: tuple[Column, ...]
    contrasts: tuple[Contrast, ...]
    axes: tuple[str, ...]
    """Names of the params in which the cells differ."""
    definitions: dict[str, str]
    """Hash of what each row of the ablation trains, by name."""
    facts: dict[str, str | int | float]
    """Facts about the data: oracle, baselines, sizes."""
    schema: int = 1
    """`lit_lazy.config.key.SCHEMA` of the cells' keys; plans of schema 1 lack the field."""
    declaration: Declaration | None = None
    """The declaration of the question that the ablation answers, if any."""
    primary: tuple[str, ...] = ()
    """As in `Ablation`; empty in older plans."""
    files: dict[str, str] = field(default_factory=dict)
    """Hashes of the user's files that are in no commit, by name; empty in plans of format 1."""
    format: int = FORMAT

    def to_json(self) -> str:
        declared = None if self.declaration is None else self.declaration.to_json()
        return json.dumps(asdict(self) | {"declaration": declared}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Parse a plan.

        Raises a one-line ValueError if the text is none, NewerFormatError if a newer version wrote it.
        """
        try:
            plan: dict[str, Any] = parse_json(text)
            if isinstance(plan, Mapping):
                require_known_format(PLAN, plan, FORMAT)
            rows: list[dict[str, Any]] = plan["rows"]
            plan["rows"] = tuple(RowInfo(**row | {"seeds": tuple(row["seeds"])}) for row in rows)
            plan["columns"] = tuple(map(Column.from_json, plan["columns"]))
            plan["axes"] = tuple(plan["axes"])
            plan["primary"] = tuple(plan.get("primary", ()))
            plan["contrasts"] = tuple(Contrast(**contrast) for contrast in plan["contrasts"])
            if plan.get("declaration"):
                plan["declaration"] = Declaration.from_json(plan["declaration"])
            return cls(**plan)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ValueError(f"no plan ({describe_exception(error)})") from None

    def make_table_spec(self, observations: Sequence[Observation], warnings: Sequence[str]) -> TableSpec:
        """The spec of the plan's table, given its cells."""
        variants = {row.variant for row in self.rows}
        measured = {name for observation in observations for name in observation.metrics}
        columns = _explain_by_start(self.columns, observations)
        # Metrics that some models or data lack are left out silently.
        known = measured | {column.key for column in COLUMNS} | SCALARS.keys()
        absent = [
            f"{column.key!r}{did_you_mean(column.key, measured)}"
            for column in columns
            if measured and column.key.removeprefix("init/") not in known
        ]
        left_out = [f"Left out, as no cell reports them: {', '.join(absent)}."] if absent else []
        return TableSpec(
            ablation=self.ablation,
            base=self.base,
            baseline=self.baseline,
            rows=self.rows,
            # Columns of other data sources (bits per byte, trigger accuracy) have no value in any cell.
            columns=tuple(column for column in columns if column.key in measured or not measured),
            contrasts=tuple(contrast for contrast in self.contrasts if set(contrast.weights) <= variants),
            command=self.command,
            labels=("backend",),
            alternatives=ALTERNATIVES,
            warnings=[*warnings, *left_out],
            primary=self.primary,
            declaration=self.declaration,
            yardstick=make_yardstick(self.facts),
            files=self.files,
        )

    def merge(self, former: "Plan", order: Sequence[str], find_changes: Callable[[str], str]) -> "Plan":
        """This plan with the rows and seeds of a former plan added; rows follow `order`.

        find_changes: says what changed in a row.

        Raises ValueError if the trainings of rows have changed: a table must not mix the two.
        """
        if self.schema != former.schema:
            raise ValueError(
                f"{self.ablation} on {self.base}: was begun by another version of lit-lazy, whose cells have other "
                "keys; --fresh moves its results away, another --runs folder keeps both; `lit-lazy ablate table` still "
                "shows them"
            )
        named = {definition: name for name, definition in self.definitions.items()}
        changes: dict[str, str] = {}
        for row in former.rows:
            renamed = named.get(former.definitions.get(row.variant, ""))
            if row.variant not in self.definitions and renamed is not None:
                raise ValueError(
                    f"row {row.variant!r}: is named {renamed!r} now; another name of the ablation takes the finished "
                    "cells over, --fresh moves them away"
                )
            if row.variant not in order:
                changes[row.variant] = GONE
            elif self.definitions.get(row.variant) != former.definitions.get(row.variant):
                changes[row.variant] = find_changes(row.variant)
        if changes:
            raise ChangedRowError(changes)
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
            declaration=self._merge_declaration(former.declaration),
        )

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


def _explain_by_start(columns: Iterable[Column], observations: Iterable[Observation]) -> list[Column]:
    """The columns; if no two rows start at different tau, without the claim that they do."""
    starts = {observation.metrics.get("init/tau/mean") for observation in observations}
    if len(starts) > 1:
        return list(columns)
    return [replace(column, by_construction="") if column.by_construction == STARTS else column for column in columns]


def make_yardstick(facts: Mapping[str, str | int | float]) -> Yardstick | None:
    """What the losses of cells on these data are held against; None if the facts lack the marks."""
    learned = compute_learned_nats(facts)
    if learned is None:
        return None
    if "optimum_nats" not in facts:
        marks = {name: float(facts[f"{name}_bits_per_byte"]) for name in ("trigram", "unigram")}
        return Yardstick("loss/bits_per_byte", learned / math.log(2) / float(facts["bytes_per_token"]), marks)
    optimum, chance = float(facts["optimum_nats"]), float(facts["chance_nats"])
    return Yardstick("loss/excess", learned - optimum, {"optimum": 0.0, "chance": chance - optimum})


def find_parent(tracker: Tracker) -> str:
    """Id of the parent run of the grid in the runs folder; without one, of the newest in the experiment.

    Others may have run the same ablation with the same MLflow. Raises ValueError if there is no ablation.
    """
    parents = tracker.find({"kind": "ablation"})
    if not parents:
        raise ValueError("the MLflow experiment holds no ablation; run `lit-lazy ablate run` first")
    kept = tracker.folder / GRID_ID
    grid_id = kept.read_text(encoding="utf-8", errors="replace") if kept.exists() else ""
    own = [run for run in parents if run.tags.get("grid") == grid_id]
    return (own or parents)[-1].run_id


@contextmanager
def open_records(folder: Path) -> Iterator[tuple[Tracker, str] | None]:
    """MLflow, a copy if it is read-only, and the parent run in it of a grid's folder; None if it lacks the grid."""
    with open_readable(default_uri(folder.parent)) as uri:
        check_store(uri)
        if folder.name in list_experiment_names(uri, kind="ablation"):
            tracker = Tracker(uri, folder.parent, folder.name)
            yield tracker, find_parent(tracker)
        else:
            yield None


def read_plan(tracker: Tracker, parent_id: str) -> Plan:
    """The plan of a parent run. Raises a one-line ValueError if it is damaged."""
    try:
        return Plan.from_json(tracker.read_text(parent_id, PLAN))
    except ValueError as error:
        raise ValueError(
            f"{PLAN}, stored with the MLflow run, is damaged ({one_line(error)}); run the grid's command again to "
            "rewrite it"
        ) from None


def build_table_from_mlflow(tracker: Tracker, parent_id: str) -> Table:
    """Build the table of a parent run from its plan and its child runs only."""
    plan = read_plan(tracker, parent_id)
    runs = select_one_per_cell(tracker.find_children(parent_id))
    observations = [_make_observation(run) for run in runs]
    table = build_table(plan.make_table_spec(observations, _make_warnings(plan, runs)), observations)
    elsewhere = _sum_seconds([run for run in runs if run.tags.get("taken_from")]) or 0.0
    return add_verdict(replace(table, seconds=_sum_seconds(runs), seconds_elsewhere=elsewhere), plan.declaration)


def _sum_seconds(runs: Sequence[TrackedRun]) -> float | None:
    spent = [value for run in runs if run.state == "complete" for name, value in run.metrics.items() if name in SPENT]
    return sum(spent) if spent else None


def select_one_per_cell(runs: Sequence[TrackedRun]) -> list[TrackedRun]:
    """Choose one run per cell: the complete one, otherwise the newest."""
    chosen: dict[str, TrackedRun] = {}
    for run in runs:
        known = chosen.get(run.tags["cell"])
        if known is None or known.state != "complete":
            chosen[run.tags["cell"]] = run
    return list(chosen.values())


def _make_observation(run: TrackedRun) -> Observation:
    return Observation(
        variant=run.tags["variant"],
        seed=int(run.tags["seed"]),
        status=run.state,
        metrics=run.metrics,
        labels={"backend": run.tags["backend"]} if "backend" in run.tags else {},
        normaliser=get_normaliser_name(run.params),
        position=run.params.get("model.position", ""),
        git_sha=run.tags.get("git_sha", ""),
        environment=run.tags.get("environment", ""),
        reason=run.tags.get("reason", ""),
        taken_from=run.tags.get("taken_from", ""),
    )


def _make_warnings(plan: Plan, runs: Sequence[TrackedRun]) -> list[str]:
    """What makes a table's losses doubtful: its data, or too short a training."""
    return [*list_doubts(plan.facts), *_warn_undertrained(plan, runs)]


def _warn_undertrained(plan: Plan, runs: Sequence[TrackedRun]) -> list[str]:
    """Warn if the best softmax row does not clearly beat the trigram baseline."""
    if "trigram_bits_per_byte" not in plan.facts:
        return []
    trigram, losses = float(plan.facts["trigram_bits_per_byte"]), _collect_softmax_losses(runs)
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


def _collect_softmax_losses(runs: Sequence[TrackedRun]) -> dict[str, list[float]]:
    """Bits per byte of the complete softmax runs, by row."""
    losses: dict[str, list[float]] = {}
    for run in runs:
        bits = run.metrics.get("loss/bits_per_byte")
        if get_normaliser_name(run.params) == "Softmax" and run.state == "complete" and bits is not None:
            losses.setdefault(run.tags["variant"], []).append(bits)
    return losses


def save_views(tracker: Tracker, plan: Plan, columns: Sequence[Column], ended: bool) -> None:
    """Save MLflow's views of an ablation; only plotted columns get charts, or all columns if none is plotted.

    ended: whether all cells have ended, so that charts can leave out rows with an outlying loss.
    """
    plotted = [column.key for column in columns if column.plotted]
    tracker.save_views(plan.axes, [column.key for column in columns], plotted or None, ended)
