"""Build the table of an ablation from its cells, or from its table.json, which holds the values of every seed."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from lit_lazy.support.checks import fits, require
from lit_lazy.support.errors import describe_exception
from lit_lazy.support.stored_records import make_record, parse_record
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.records import (
    FORMAT,
    STATUS_ORDER,
    Column,
    Contrast,
    ContrastRow,
    Detectable,
    Measure,
    Observation,
    RowInfo,
    Status,
    Summary,
    Table,
    TableRow,
    Yardstick,
    join_or_mixed,
)
from lit_lazy.table.statistics import (
    ALPHA,
    FEWEST_SEEDS,
    Effect,
    SeedValues,
    compute_contrast,
    drop_undefined,
    estimate,
    holm,
    minimum_detectable_effect,
    tost,
)
from lit_lazy.table.verdicts import add_verdict

TABLE = "table.json"
Values = Mapping[str, float | None]
"""One metric of one row by seed."""


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
    known = {
        name: {column.key: {str(o.seed): o.metrics.get(column.key) for o in cells} for column in spec.columns}
        for name, cells in complete.items()
    }
    table = Table(
        ablation=spec.ablation,
        base=spec.base,
        baseline=spec.baseline,
        command=spec.command,
        environment=join_or_mixed({o.environment for cells in complete.values() for o in cells if o.environment}),
        rows=tuple(_build_row(row, by_variant[row.variant], spec.labels) for row in spec.rows),
        columns=tuple(spec.columns),
        summaries={},
        warnings=tuple(spec.warnings),
        notes=tuple(_collect_notes(spec, observed, expected, complete)),
        declaration=spec.declaration,
        yardstick=spec.yardstick,
        files=dict(spec.files),
    )
    return add_statistics(table, known, spec.contrasts, spec.primary)


def recompute_statistics(
    table: Table, columns: Sequence[Column], contrasts: Sequence[Contrast], primary: Sequence[str]
) -> Table:
    """Recompute a table's statistics from its values under the given declarations.

    Columns that the table lacks and contrasts of rows that it lacks are ignored.
    """
    declared = {column.key: column for column in columns}
    # A column is by construction only where the table's rows differ so.
    columns = [
        replace(declared.get(column.key, column), by_construction=column.by_construction) for column in table.columns
    ]
    known = {row.variant: row.values for row in table.rows}
    contrasts = [contrast for contrast in contrasts if known.keys() >= contrast.weights.keys()]
    return add_statistics(replace(table, columns=tuple(columns)), known, contrasts, primary)


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
    columns = tuple(make_record(Column, column) for column in data["columns"])
    rows = tuple(make_record(TableRow, row, metrics={}) for row in data["rows"])
    variants = [row.variant for row in rows]
    twice = sorted({variant for variant in variants if variants.count(variant) > 1})
    require(not twice, "rows", twice, "there twice")
    table = make_record(
        Table,
        data,
        rows=rows,
        columns=columns,
        summaries={},
        contrasts=(),
        primary=None,
        verdict=None,
    )
    known: dict[str, dict[str, dict[str, float]]] = {}
    for row in data["rows"]:
        # Format 1 has a metric's values by seed among its statistics.
        values = known[row["variant"]] = {key: part.get("values", part) for key, part in row["metrics"].items()}
        for part in values.values():
            require(fits(part, dict[str, float]), "values", part, "must be finite numbers by seed")
    contrasts = [Contrast(contrast["name"], contrast["weights"]) for contrast in data["contrasts"]]
    primary = [data["primary"]] if data["primary"] else []
    return add_verdict(add_statistics(table, known, contrasts, primary), table.declaration)


def add_statistics(
    table: Table, known: Mapping[str, Mapping[str, Values]], contrasts: Sequence[Contrast], primary: Sequence[str]
) -> Table:
    """The table with the statistics of the known values, by row and key, of its complete cells."""
    variants = [row.variant for row in table.rows if table.baseline and row.variant != table.baseline]
    differences = {variant: {variant: 1.0, table.baseline: -1.0} for variant in variants}
    measures, tested, summaries = {}, {}, {}
    for column in table.columns:
        values = {
            row.variant: {
                seed: known[row.variant].get(column.key, {}).get(str(seed)) for seed in row.cells.get("complete", [])
            }
            for row in table.rows
        }
        effects = _compute_effects(column, values, differences)
        same = {} if column.margin is None else {name: tost(e, column.margin) for name, e in effects.items()}
        p_same, found = _adjust_p_values(same, effects), {}
        for name, seeds in values.items():
            own = estimate(seeds, column.bounds)
            defined = {str(seed): value for seed, value in drop_undefined(seeds).items()}
            effect = effects.get(name, Effect(None, None, 0))
            found[name] = Measure(own.mean, own.ci95, own.n, own.undefined, defined, effect, p_same.get(name))
        measures[column.key] = found
        summaries[column.key] = _build_summary(measures[column.key], effects)
        tested[column.key] = _compute_effects(column, values, {c.name: c.weights for c in contrasts})
    return replace(
        table,
        rows=tuple(replace(row, metrics={key: of[row.variant] for key, of in measures.items()}) for row in table.rows),
        summaries=summaries,
        contrasts=tuple(
            ContrastRow(c.name, dict(c.weights), {key: of[c.name] for key, of in tested.items()}) for c in contrasts
        ),
        primary=next((key for key in primary if key in measures), None),
    )


def _compute_effects(
    column: Column, values: Mapping[str, SeedValues], contrasts: Mapping[str, Mapping[str, float]]
) -> dict[str, Effect]:
    """The effects of contrasts, given as weights of rows by name, in one family of tests."""
    effects = {name: compute_contrast(values, weights, column.bounds) for name, weights in contrasts.items()}
    if column.by_construction:
        effects = {
            name: effect if effect.p is None else replace(effect, test="construction", p=None)
            for name, effect in effects.items()
        }
    p_adj = _adjust_p_values({name: effect.p for name, effect in effects.items()}, effects)
    return {
        name: replace(effect, p_adj=p_adj.get(name), mde=minimum_detectable_effect(effect))
        for name, effect in effects.items()
    }


def _adjust_p_values(p_values: Mapping[str, float | None], effects: Mapping[str, Effect]) -> dict[str, float]:
    """Holm's adjusted p values; the family are all effects that could be compared."""
    compared = sum(effect.n >= FEWEST_SEEDS for effect in effects.values())
    return holm({name: p for name, p in p_values.items() if p is not None}, family=compared)


def _build_summary(rows: Mapping[str, Measure], effects: Mapping[str, Effect]) -> Summary:
    compared = sum(effect.n >= FEWEST_SEEDS for effect in effects.values())
    tested = [effect for effect in effects.values() if effect.test == "t"]

    def median_mde(alpha: float, n: int) -> float:
        found = (minimum_detectable_effect(effect, alpha) for effect in tested if effect.n == n)
        return median(mde for mde in found if mde is not None)

    return Summary(
        compared=compared,
        tested=len(tested),
        separates=tuple(name for name, effect in effects.items() if effect.separated),
        same=tuple(name for name in effects if (p := rows[name].p_same) is not None and p < ALPHA),
        seeds=tuple(sorted({effect.n for effect in effects.values() if effect.n})),
        # Rows with more seeds detect much smaller differences, so a median over all rows would describe none of them.
        detectable=tuple(
            Detectable(n, median_mde(ALPHA, n), median_mde(ALPHA / compared, n))
            for n in sorted({effect.n for effect in tested})
        ),
    )


def _build_row(info: RowInfo, cells: Sequence[Observation], labels: Sequence[str]) -> TableRow:
    status: dict[int, Status] = dict.fromkeys(info.seeds, "missing")
    status |= {o.seed: o.status for o in cells}
    complete = [o for o in cells if o.status == "complete"]
    return TableRow(
        variant=info.variant,
        base=info.base,
        source=info.source,
        cells={s: sorted(seed for seed in status if status[seed] == s) for s in STATUS_ORDER if s in status.values()},
        reasons={str(o.seed): o.reason for o in cells if o.reason},
        git_shas=tuple(sorted({o.git_sha for o in complete if o.git_sha})),
        labels={label: join_or_mixed({o.labels[label] for o in complete if label in o.labels}) for label in labels},
        note=info.note,
        metrics={},
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
