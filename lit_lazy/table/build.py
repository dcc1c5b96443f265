"""The table of an ablation from what is known of its cells: means, differences to the baseline, tests, notes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lit_lazy.table.records import (
    STATUS_ORDER,
    Column,
    Contrast,
    ContrastMeasure,
    ContrastRow,
    Detectable,
    Measure,
    Observation,
    RowInfo,
    Status,
    Summary,
    Table,
    TableRow,
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
    seed_correlation,
    tost,
)

Values = Mapping[str, SeedValues]
"""One metric: by variant and seed, complete cells only."""


def build_table(
    ablation: str,
    base: str,
    baseline: str,
    rows: Sequence[RowInfo],
    columns: Sequence[Column],
    contrasts: Sequence[Contrast],
    observations: Iterable[Observation],
    command: str,
    labels: Sequence[str] = (),
    warnings: Sequence[str] = (),
    primary: Sequence[str] = (),
) -> Table:
    """The table of an ablation from what is known of its cells; independent of the observations' order.

    `rows` say which cells are expected: one without an observation is missing, an observation that no row asks for is
    left out and named in the notes. `labels` are names of `Observation.labels` shown as one value per row. The first
    key of `primary` that is a column's is the primary outcome: data sources measure different ones.
    Raises ValueError for a baseline or contrast that names no row, and for anything given twice.
    """
    variants = [row.variant for row in rows]
    _require_unique("variant", variants)
    _require_unique("column", [column.key for column in columns])
    _require_unique("contrast", [contrast.name for contrast in contrasts])
    for name, asked in [("baseline", {baseline}), *((f"contrast {c.name!r}", set(c.weights)) for c in contrasts)]:
        if unknown := asked - set(variants):
            raise ValueError(f"{name}: no row is called {sorted(unknown)[0]!r}; the rows are {', '.join(variants)}")

    observed = sorted(observations, key=lambda o: (o.variant, o.seed))
    _require_unique("cell", [f"{o.variant}, seed {o.seed}" for o in observed])
    expected = {(row.variant, seed) for row in rows for seed in row.seeds}
    by_variant = {name: [o for o in observed if o.variant == name and (name, o.seed) in expected] for name in variants}
    complete = {name: [o for o in cells if o.status == "complete"] for name, cells in by_variant.items()}
    values = {
        column.key: {name: {o.seed: o.metrics.get(column.key) for o in cells} for name, cells in complete.items()}
        for column in columns
    }
    results = {column.key: _compute_results(column, values[column.key], contrasts, baseline) for column in columns}
    return Table(
        ablation=ablation,
        base=base,
        baseline=baseline,
        command=command,
        environment=join_or_mixed({o.environment for cells in complete.values() for o in cells if o.environment}),
        rows=tuple(
            _build_row(
                row, by_variant[row.variant], {key: found.rows[row.variant] for key, found in results.items()}, labels
            )
            for row in rows
        ),
        columns=tuple(columns),
        summaries={key: found.summary for key, found in results.items()},
        contrasts=_build_contrast_rows(contrasts, results),
        warnings=tuple(warnings),
        notes=tuple(_collect_notes(rows, columns, observed, expected, complete)),
        primary=_find_primary(primary, columns),
    )


def recompute_statistics(
    table: Table, columns: Sequence[Column], contrasts: Sequence[Contrast], primary: Sequence[str]
) -> Table:
    """A table with its statistics computed anew from its values, by the declarations that are given now.

    Of `columns` those that the table has; contrasts of rows that it has not are left out.
    """
    declared = {column.key: column for column in columns}
    columns = [declared.get(column.key, column) for column in table.columns]
    names = {row.variant for row in table.rows}
    contrasts = [contrast for contrast in contrasts if set(contrast.weights) <= names]
    results = {
        column.key: _compute_results(column, _collect_values(table, column.key), contrasts, table.baseline)
        for column in columns
    }
    return replace(
        table,
        rows=tuple(
            replace(row, metrics={key: found.rows[row.variant] for key, found in results.items()}) for row in table.rows
        ),
        columns=tuple(columns),
        summaries={key: found.summary for key, found in results.items()},
        contrasts=_build_contrast_rows(contrasts, results),
        primary=_find_primary(primary, columns),
    )


def _collect_values(table: Table, key: str) -> Values:
    return {
        row.variant: {seed: row.metrics[key].values.get(str(seed)) for seed in row.cells.get("complete", [])}
        for row in table.rows
    }


def _find_primary(primary: Sequence[str], columns: Sequence[Column]) -> str | None:
    keys = {column.key for column in columns}
    return next((key for key in primary if key in keys), None)


@dataclass(frozen=True)
class _ColumnResults:
    """Of one column, by variant and by contrast."""

    rows: dict[str, Measure]
    contrasts: dict[str, ContrastMeasure]
    summary: Summary


def _compute_results(column: Column, values: Values, contrasts: Sequence[Contrast], baseline: str) -> _ColumnResults:
    correlation = seed_correlation(values, column.bounds)

    def effect(weights: Mapping[str, float]) -> Effect:
        found = compute_contrast(values, weights, column.bounds, correlation)
        return replace(found, test="construction", p=None) if column.by_construction and found.p is not None else found

    effects = {name: effect({name: 1.0, baseline: -1.0}) for name in values if name != baseline}
    rows = _build_measures(column, values, effects)
    return _ColumnResults(
        rows,
        _build_contrast_measures({c.name: effect(c.weights) for c in contrasts}),
        _build_summary(rows, effects),
    )


def _build_contrast_rows(
    contrasts: Sequence[Contrast], results: Mapping[str, _ColumnResults]
) -> tuple[ContrastRow, ...]:
    return tuple(
        ContrastRow(c.name, dict(c.weights), {key: found.contrasts[c.name] for key, found in results.items()})
        for c in contrasts
    )


_NOT_COMPARED = Effect(None, None, 0)


def _build_measures(column: Column, values: Values, effects: Mapping[str, Effect]) -> dict[str, Measure]:
    adjusted, same = _adjust_p_values(effects), _test_equivalence(effects, column.margin)
    measures = {}
    for name, seeds in values.items():
        mean = estimate(seeds, column.bounds)
        effect = effects.get(name, _NOT_COMPARED)
        measures[name] = Measure(
            mean=mean.mean,
            ci95=mean.ci95,
            n=mean.n,
            undefined=mean.undefined,
            values={str(seed): value for seed, value in drop_undefined(seeds).items()},
            diff=effect.mean,
            diff_ci95=effect.ci95,
            diff_n=effect.n,
            diff_se=effect.se,
            diff_df=effect.df,
            diff_low=effect.low,
            diff_high=effect.high,
            test=effect.test,
            p=effect.p,
            p_adj=adjusted.get(name),
            mde=minimum_detectable_effect(effect),
            p_same=same.get(name),
        )
    return measures


def _build_contrast_measures(effects: Mapping[str, Effect]) -> dict[str, ContrastMeasure]:
    adjusted = _adjust_p_values(effects)
    return {
        name: ContrastMeasure(
            e.mean,
            e.ci95,
            e.n,
            e.se,
            e.df,
            e.low,
            e.high,
            e.test,
            e.p,
            adjusted.get(name),
            minimum_detectable_effect(e),
        )
        for name, e in effects.items()
    }


def _adjust_p_values(effects: Mapping[str, Effect]) -> dict[str, float]:
    p_values = {name: e.p for name, e in effects.items() if e.p is not None}
    return holm(p_values, family=_count_compared(effects))


def _test_equivalence(effects: Mapping[str, Effect], margin: float | None) -> dict[str, float]:
    if margin is None:
        return {}
    found = {name: tost(e, margin) for name, e in effects.items()}
    return holm({name: p for name, p in found.items() if p is not None}, family=_count_compared(effects))


def _count_compared(effects: Mapping[str, Effect]) -> int:
    return sum(e.n >= FEWEST_SEEDS for e in effects.values())


def _build_summary(rows: Mapping[str, Measure], effects: Mapping[str, Effect]) -> Summary:
    compared = _count_compared(effects)
    tested = [e for e in effects.values() if e.test == "t"]
    return Summary(
        compared=compared,
        tested=len(tested),
        separates=tuple(name for name in effects if rows[name].separated),
        same=tuple(name for name in effects if rows[name].same),
        seeds=tuple(sorted({e.n for e in effects.values() if e.n})),
        undefined=sum(m.undefined for m in rows.values()),
        # Rows with more seeds find much smaller differences: one median over all would be true of none.
        detectable=tuple(
            Detectable(n, _median_mde(ALPHA, of_n), _median_mde(ALPHA / compared, of_n))
            for n in sorted({e.n for e in tested})
            for of_n in [[e for e in tested if e.n == n]]
        ),
    )


def _median_mde(alpha: float, effects: Sequence[Effect]) -> float:
    return median(found for e in effects if (found := minimum_detectable_effect(e, alpha)) is not None)


def _build_row(
    info: RowInfo, cells: Sequence[Observation], measures: dict[str, Measure], labels: Sequence[str]
) -> TableRow:
    status: dict[int, Status] = dict.fromkeys(info.seeds, "missing")
    status |= {o.seed: o.status for o in cells}
    complete = [o for o in cells if o.status == "complete"]
    return TableRow(
        variant=info.variant,
        base=info.base,
        source=info.source,
        n=len(complete),
        status=next((s for s in STATUS_ORDER if s in status.values()), "missing"),
        cells={s: sorted(seed for seed in status if status[seed] == s) for s in STATUS_ORDER if s in status.values()},
        reasons={str(o.seed): o.reason for o in cells if o.reason},
        git_shas=tuple(sorted({o.git_sha for o in complete if o.git_sha})),
        labels={label: join_or_mixed({o.labels[label] for o in complete if label in o.labels}) for label in labels},
        note=info.note,
        metrics=measures,
        normaliser=join_or_mixed({o.normaliser for o in complete}),
        position=join_or_mixed({o.position for o in complete}),
    )


def _collect_notes(
    rows: Sequence[RowInfo],
    columns: Sequence[Column],
    observed: Sequence[Observation],
    expected: set[tuple[str, int]],
    complete: Mapping[str, Sequence[Observation]],
) -> list[str]:
    notes = [f"{row.variant}: {row.note}" for row in rows if row.note]
    notes += [f"{column.title}: {column.note}" for column in columns if column.note]
    reported = {key for cells in complete.values() for o in cells for key in o.metrics}
    if reported:
        notes += [f"{c.title}: no cell reports the metric {c.key!r}." for c in columns if c.key not in reported]
    if extra := [f"{o.variant} seed {o.seed}" for o in observed if (o.variant, o.seed) not in expected]:
        notes.append("Left out, because the ablation does not ask for them: " + ", ".join(extra) + ".")
    return notes


def _require_unique(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what}: {name!r} is given twice; keep one")
