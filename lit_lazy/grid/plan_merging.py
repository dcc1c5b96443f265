"""Adds what a command asks for to the plan that a grid's folder has."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lit_lazy.config.key import evaluation_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import flatten, from_dict
from lit_lazy.grid.cell_record import CellRecord
from lit_lazy.grid.cell_state import read_state
from lit_lazy.grid.grid_folder import GridFolder
from lit_lazy.grid.grid_table import add_note, name_version
from lit_lazy.grid.plan import Plan
from lit_lazy.grid.work_records import Grid
from lit_lazy.support.console import format_count, format_duration
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.records import RowInfo
from lit_lazy.training.run_folder import FINAL_CHECKPOINT

GONE = "was removed from the ablation"
MOST_CHANGES = 3
"""Changed settings that a message shows."""
THEN = ", then "
"""Between the commands of a plan."""


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


def merge_plan(grid: Grid) -> tuple[Plan, list[CellRecord]]:
    """The plan of a grid with what its folder holds. Creates nothing.

    Also the finished cells whose new evaluations can be had without training.

    Raises a one-line ValueError if the trainings of rows changed since the grid began, or if finished cells kept no
    models for the evaluations that they lack; not if the grid trains such rows anew.
    """
    known = GridFolder.read(grid.folder)
    if known is None:
        return grid.plan, []
    asked = {(cell.variant, cell.seed): cell for cell in grid.cells}
    same, others = list[CellRecord](), set[str]()  # finished cells of the same training; rows with cells of another
    for cell in known.cells:
        now = asked.get((cell.variant, cell.seed))
        if now is None or now.key == cell.key or cell.result is None:
            continue
        if cell.result.training_key == now.training_key:
            same.append(cell)
        else:
            others.add(cell.variant)
    lacking = [cell for cell in same if read_state(grid.locate(asked[cell.variant, cell.seed].key)) != "complete"]
    measurable = [cell for cell in lacking if (cell.folder / FINAL_CHECKPOINT).exists()]
    if len(measurable) < len(lacking) and not grid.changed:
        lost = [cell.metrics.get("time/train_seconds", 0.0) for cell in lacking if cell not in measurable]
        raise ValueError(
            f"evaluations: changed, and {len(lost)} finished cells kept no model to measure; --changed trains them "
            f"again, which took {format_duration(sum(lost))}, and with --keep-checkpoint once for all later metrics"
        )
    only_measured, former = {cell.variant for cell in same} - others, known.cells
    mixed = _find_mixed(grid, former, only_measured)

    def find_changes(variant: str) -> str:
        """What changed in a row since its first cell; "" if only what is measured on its finished models did."""
        if variant in mixed:
            return "its evaluations, also of seeds that this command leaves out, changed"
        if variant in only_measured:
            return ""
        begun = [cell.settings for cell in former if cell.variant == variant and cell.settings]
        now = [cell.config for cell in grid.cells if cell.variant == variant]
        if not (begun and now):
            return "its settings, code or data changed"
        return describe_changes(begun[0], now[0]) or "its code or data changed"

    finished = {cell.key for cell in known.cells if cell.status == "complete"} if grid.changed else None
    return merge(grid.plan, known.plan, grid.row_order, find_changes, finished), measurable


def _find_mixed(grid: Grid, former: Collection[CellRecord], variants: Collection[str]) -> set[str]:
    """Rows whose metrics would have one name but two meanings: finished cells not asked for have other evaluations."""
    asked, now = {(cell.variant, cell.seed) for cell in grid.cells}, {cell.variant: cell.config for cell in grid.cells}
    keys = {name: {*map(evaluation_key, from_dict(RunConfig, now[name]).evaluations)} for name in variants}
    left_out = [cell for cell in former if cell.variant in keys and (cell.variant, cell.seed) not in asked]
    return {cell.variant for cell in left_out if cell.result and cell.result.evaluations.keys() - keys[cell.variant]}


def describe_measurable(cells: Collection[CellRecord]) -> str:
    """A line on the cells of which `merge_plan` says that they are measurable."""
    return f"{format_count(len(cells), 'cell')} trained already: only evaluations are measured"


def describe_changes(former: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Which settings of a row changed: `train.steps changed from 6 to 8`; '' if none did.

    former: of an earlier cell, by dotted path. config: in canonical form. What only one of them has belongs to
    a class that changed, or is a field of another version; another path of the same weights changes nothing.
    """
    now = {path: str(value) for path, value in flatten(config).items() if path not in ("seed", "init_from")}
    changed = [path for path, value in now.items() if str(former.get(path, value)) != value]
    more = f" and {len(changed) - MOST_CHANGES} more" if len(changed) > MOST_CHANGES else ""
    return ", ".join(f"{path} changed from {former[path]} to {now[path]}" for path in changed[:MOST_CHANGES]) + more


def merge(
    now: Plan,
    former: Plan,
    order: Sequence[str],
    find_changes: Callable[[str], str],
    finished: Collection[str] | None = None,
) -> Plan:
    """A plan with the rows and seeds of a former plan added; rows follow `order`.

    find_changes: says what changed in a row, "" if not its trainings. finished: keys of the former plan's finished
    cells, which stay beside those of rows whose trainings have changed; None to refuse such rows.

    Raises ValueError if the trainings of rows have changed: a table must not mix the two.
    """
    if now.schema != former.schema:
        raise ValueError(
            f"{now.ablation} on {now.base}: was begun by another version of lit-lazy, whose cells have other keys; "
            "--fresh moves its results away, another --runs folder keeps both; `lit-lazy ablate table` still shows them"
        )
    changes = _collect_changes(now, former, order, find_changes)
    if changes and (finished is None or GONE in changes.values()):
        raise ChangedRowError(changes)
    definitions = former.definitions | now.definitions
    former = _set_aside(former, changes, now, finished or ())
    order = [name for row in order for name in (row, *(old for old, new in former.replaced.items() if new == row))]
    rows, command = {row.variant: row for row in former.rows}, former.command
    adds = now.declaration is not None and now.declaration.digest != getattr(former.declaration, "digest", None)
    for row in now.rows:
        known = rows.get(row.variant, replace(row, seeds=()))
        rows[row.variant] = replace(row, seeds=tuple(sorted({*row.seeds, *known.seeds})))
        adds |= rows[row.variant].seeds != known.seeds
    if adds and now.command not in command.split(THEN):
        command += THEN + now.command
    return replace(
        now,
        command=command,
        rows=tuple(rows[name] for name in order if name in rows),
        axes=tuple(dict.fromkeys([*former.axes, *now.axes])),
        definitions=definitions,
        replaced=former.replaced,
        declaration=_merge_declaration(now.declaration, former.declaration),
        keys={name: former.keys.get(name, {}) | now.keys.get(name, {}) for name in order if name in rows},
        # A row's values stay: MLflow takes new ones only.
        axis_values={name: now.axis_values.get(name, {}) | former.axis_values.get(name, {}) for name in rows},
    )


def _collect_changes(
    now: Plan, former: Plan, order: Sequence[str], find_changes: Callable[[str], str]
) -> dict[str, str]:
    """What changed in each row of a former plan that was not set aside."""
    changes: dict[str, str] = {}
    for name in (row.variant for row in former.rows if row.variant not in former.replaced):
        if name not in order:
            changes[name] = GONE
        elif now.definitions.get(name) != former.definitions.get(name) and (change := find_changes(name)):
            changes[name] = change
    return changes


def _set_aside(former: Plan, changes: Mapping[str, str], now: Plan, finished: Collection[str]) -> Plan:
    """A former plan with the finished cells of changed rows in rows of other names.

    Also of those that `now` does not train: rows that it does train are not comparable with what they were. A row that
    was set aside and is again what the ablation defines gets its name back.
    """
    names = {variant: name_version(variant, former.definitions.get(variant, "")) for variant in changes}
    unchanged = {row.variant for row in former.rows} - changes.keys()
    for variant in now.keys.keys() - unchanged:
        names[name_version(variant, now.definitions.get(variant, ""))] = variant
    asked = {key for by_seed in now.keys.values() for key in by_seed.values()}  # also under another row's name
    rows: dict[str, RowInfo] = {}
    keys, axis_values, replaced = {}, {}, {}
    for row in former.rows:
        known, name = former.get_keys(row), names.get(row.variant, row.variant)
        is_new = row.variant in changes and name != row.variant
        if is_new or (row.variant in former.replaced and name == row.variant):
            here = {seed: key for seed, key in known.items() if not is_new or key in finished}
            if not (known := {seed: key for seed, key in here.items() if key not in asked}):
                continue
            row = replace(row, seeds=tuple(sorted(map(int, known))))
            replaced[name] = row.variant if is_new else former.replaced[name]
            row = add_note(row, f"before {changes[row.variant]}") if is_new else row
        rows[name] = replace(row, variant=name)
        keys[name], axis_values[name] = known, former.axis_values.get(row.variant, {})
    return replace(former, rows=tuple(rows.values()), keys=keys, axis_values=axis_values, replaced=replaced)


def _merge_declaration(now: Declaration | None, former: Declaration | None) -> Declaration | None:
    """The declaration with its commit at the beginning of the grid, or marked as changed since.

    A change that was committed later does not make up for a beginning without a commit. One that was undone counts
    no more.
    """
    if now is None or (former is not None and former.digest == now.digest):
        return former if now is not None else None
    digest, commit = ("", "") if former is None else former.begun or (former.digest, former.commit)
    seen = former is not None and former.seen
    if digest == now.digest:
        return replace(now, commit=commit, seen=seen)
    return replace(now, changed=True, begun=(digest, commit), seen=seen, commit=now.commit if commit else "")
