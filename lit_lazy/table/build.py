"""Build the table of an ablation from its cells, or from its table.json, which holds the values of every seed."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_lazy.support.error_messages import describe_exception
from lit_lazy.support.stored_records import make_record, parse_record
from lit_lazy.table.columns import Column, Contrast
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.records import STATUS_ORDER, Observation, RowInfo, Status, TableRow, Yardstick
from lit_lazy.table.results_table import FORMAT, Table, join_or_mixed
from lit_lazy.table.statistics import drop_undefined

TABLE = "table.json"


@dataclass(frozen=True)
class TableSpec:
    """What a table shows, apart from the observations.

    `rows` define the expected cells. `labels` are the names of `Observation.labels` to show, one value per row. A note
    lists the cells that differ in a label of `alternatives` although they need not: within a row, or between rows by
    values that compute the same, which are those given for the label, or all. The primary outcome is the first key of
    `primary` that is a column's: data sources have different ones.
    A baseline of "" compares no rows. Raises ValueError for a baseline or contrast without a row, and for duplicates.
    """

    ablation: str
    base: str
    baseline: str
    rows: Sequence[RowInfo]
    columns: Sequence[Column]
    contrasts: Sequence[Contrast]
    command: str
    labels: Sequence[str] = ()
    alternatives: Mapping[str, Collection[str] | None] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    primary: Sequence[str] = ()
    declaration: Declaration | None = None
    """The declaration of the question that the ablation answers, if any."""
    yardstick: Yardstick | None = None
    files: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        variants = [row.variant for row in self.rows]
        _require_unique("variant", variants)
        _require_unique("column", [column.key for column in self.columns])
        _require_unique("contrast", [contrast.name for contrast in self.contrasts])
        used = {"baseline": {self.baseline} - {""}} | {f"contrast {c.name!r}": set(c.weights) for c in self.contrasts}
        for name, names in used.items():
            if unknown := names - set(variants):
                raise ValueError(f"{name}: no row is called {min(unknown)!r}; the rows are {', '.join(variants)}")


def build_table(spec: TableSpec, observations: Iterable[Observation]) -> Table:
    """Build the table of an ablation; the result does not depend on the order of the observations.

    An expected cell without an observation is missing. An observation of an unexpected cell is left out and listed in
    the notes. Raises ValueError if a cell has two observations.
    """
    variants = [row.variant for row in spec.rows]
    observed = sorted(observations, key=lambda o: (o.variant, o.seed))
    _require_unique("cell", [f"{o.variant}, seed {o.seed}" for o in observed])
    expected = {(row.variant, seed) for row in spec.rows for seed in row.seeds}
    by_variant = {name: [o for o in observed if o.variant == name and (name, o.seed) in expected] for name in variants}
    complete = {name: [o for o in cells if o.status == "complete"] for name, cells in by_variant.items()}
    return Table(
        ablation=spec.ablation,
        base=spec.base,
        baseline=spec.baseline,
        command=spec.command,
        environment=join_or_mixed({o.environment for cells in complete.values() for o in cells if o.environment}),
        rows=tuple(_build_row(row, by_variant[row.variant], spec) for row in spec.rows),
        columns=tuple(spec.columns),
        contrasts=tuple(spec.contrasts),
        primary=_choose_primary(spec.primary, spec.columns),
        warnings=tuple(spec.warnings),
        notes=tuple(_collect_notes(spec, observed, expected, complete)),
        declaration=spec.declaration,
        yardstick=spec.yardstick,
        files=dict(spec.files),
    )


def _choose_primary(keys: Sequence[str], columns: Sequence[Column]) -> str | None:
    known = {column.key for column in columns}
    return next((key for key in keys if key in known), None)


def recompute_statistics(
    table: Table, columns: Sequence[Column], contrasts: Sequence[Contrast], primary: Sequence[str]
) -> Table:
    """The table under the given declarations.

    Columns that the table lacks and contrasts of rows that it lacks are ignored.
    """
    declared, variants = {column.key: column for column in columns}, {row.variant for row in table.rows}
    # A column is by construction only where the table's rows differ so.
    kept = [
        replace(declared.get(column.key, column), by_construction=column.by_construction) for column in table.columns
    ]
    shared = tuple(contrast for contrast in contrasts if variants >= contrast.weights.keys())
    return replace(table, columns=tuple(kept), contrasts=shared, primary=_choose_primary(primary, kept))


def read_table(path: Path) -> Table:
    """The table of a table.json. Raises a one-line ValueError that names the path if it cannot be read."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{str(path)!r}: is no table.json ({describe_exception(error)})") from None
    return parse_table(text, repr(str(path)))


def parse_table(text: str | bytes, named: str) -> Table:
    """The table of a table.json's text. Raises a one-line ValueError that starts with `named` if the text is none.

    Raises NewerFormatError if a newer version wrote it.
    """
    try:
        return parse_record(text, named, "table.json", FORMAT, _make_table)
    except ValueError as error:
        raise ValueError(f"{named}: is {error}") from None


def _make_table(data: Mapping[str, Any]) -> Table:
    table = make_record(Table, data, rows=tuple(map(_make_row, data["rows"])))
    _require_unique("variant", [row.variant for row in table.rows])
    for name in ("measures", "summaries", "effects", "verdict"):  # computed here, where odd values are refused
        getattr(table, name)
    return table


def _make_row(data: Mapping[str, Any]) -> TableRow:
    metrics = {}
    for key, part in data["metrics"].items():
        values = part.get("values", part)  # format 1 has a metric's values by seed among its statistics
        metrics[key] = {int(seed): value for seed, value in values.items()}
    return make_record(TableRow, data, metrics=metrics)


def _build_row(info: RowInfo, cells: Sequence[Observation], spec: TableSpec) -> TableRow:
    status: dict[int, Status] = dict.fromkeys(info.seeds, "missing")
    status |= {o.seed: o.status for o in cells}
    complete = [o for o in cells if o.status == "complete"]
    found = {c.key: drop_undefined({o.seed: o.metrics.get(c.key) for o in complete}) for c in spec.columns}
    labels = {label: {o.labels[label] for o in complete if label in o.labels} for label in spec.labels}
    return TableRow(
        variant=info.variant,
        base=info.base,
        source=info.source,
        cells={s: sorted(seed for seed in status if status[seed] == s) for s in STATUS_ORDER if s in status.values()},
        reasons={str(o.seed): o.reason for o in cells if o.reason},
        git_shas=tuple(sorted({o.git_sha for o in complete if o.git_sha})),
        labels={label: join_or_mixed(used) for label, used in labels.items()},
        note=info.note,
        metrics={key: values for key, values in found.items() if values},
        normaliser=join_or_mixed({o.normaliser for o in complete}),
        position=join_or_mixed({o.position for o in complete}),
    )


def _collect_notes(
    spec: TableSpec,
    observed: Sequence[Observation],
    expected: set[tuple[str, int]],
    complete: Mapping[str, Sequence[Observation]],
) -> list[str]:
    notes = [f"{row.variant}: {row.note}" for row in spec.rows if row.note]
    notes += [f"{column.title}: {column.note}" for column in spec.columns if column.note]
    reported = {key for cells in complete.values() for o in cells for key in o.metrics}
    if reported:
        notes += [f"{c.title}: no cell reports the metric {c.key!r}." for c in spec.columns if c.key not in reported]
    origins = Counter(o.taken_from for cells in complete.values() for o in cells if o.taken_from)
    notes += [f"{n} of {len(expected)} cells were taken from {origin}." for origin, n in sorted(origins.items())]
    if extra := [f"{o.variant} seed {o.seed}" for o in observed if (o.variant, o.seed) not in expected]:
        notes.append("Left out, because the ablation does not ask for them: " + ", ".join(extra) + ".")
    return [*notes, *_describe_mixture(spec.alternatives, complete)]


def _describe_mixture(
    alternatives: Mapping[str, Collection[str] | None], complete: Mapping[str, Sequence[Observation]]
) -> list[str]:
    """One sentence on the cells that differ in labels although they need not; none if there are none."""
    differing, listed = [], []
    for label, comparable in alternatives.items():
        seeds_of: dict[str, dict[str, list[int]]] = {}
        for name, cells in complete.items():
            for o in cells:
                if label in o.labels:
                    seeds_of.setdefault(name, {}).setdefault(o.labels[label], []).append(o.seed)
        used = {value for seeds in seeds_of.values() for value in seeds if comparable is None or value in comparable}
        cells_of: dict[str, list[str]] = {}
        for name, seeds in seeds_of.items():
            if len(seeds) > 1 or (len(used) > 1 and used.intersection(seeds)):
                for value, some in seeds.items():
                    which = f" (seed {', '.join(map(str, some))})" if len(seeds) > 1 else ""
                    cells_of.setdefault(value, []).append(name + which)
        if cells_of:
            differing.append(label)
            listed += [f"{label} {value}: {', '.join(names)}" for value, names in sorted(cells_of.items())]
    if not listed:
        return []
    return [f"Comparable cells differ in {' and '.join(differing)}, which may change rounding: {'; '.join(listed)}."]


def _require_unique(kind: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{kind}: {name!r} is given twice; keep one")
