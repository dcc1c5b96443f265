"""The table of an ablation from what is known of its cells: means, differences to the baseline, tests, notes."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from lit_lazy.table.records import (
    STATUS_ORDER,
    Column,
    Contrast,
    ContrastMeasure,
    ContrastRow,
    Measure,
    Observation,
    RowInfo,
    Status,
    Summary,
    Table,
    TableRow,
    one_or_mixed,
)
from lit_lazy.table.statistics import (
    ALPHA,
    FEWEST_PAIRS,
    Effect,
    contrast,
    defined,
    estimate,
    holm,
    minimum_detectable_effect,
    paired,
)


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
) -> Table:
    """The table of an ablation from what is known of its cells; independent of the observations' order.

    `rows` say which cells are expected: one without an observation is missing, an observation that no row asks for is
    left out and named in the notes. `labels` are names of `Observation.labels` shown as one value per row.
    Raises ValueError for a baseline or contrast that names no row, and for anything given twice.
    """
    variants = [row.variant for row in rows]
    _refuse_repeated("variant", variants)
    _refuse_repeated("column", [column.key for column in columns])
    _refuse_repeated("contrast", [contrast.name for contrast in contrasts])
    for name, asked in [("baseline", {baseline}), *((f"contrast {c.name!r}", set(c.weights)) for c in contrasts)]:
        if unknown := asked - set(variants):
            raise ValueError(f"{name}: no row is called {sorted(unknown)[0]!r}; the rows are {', '.join(variants)}")

    observed = sorted(observations, key=lambda o: (o.variant, o.seed))
    _refuse_repeated("cell", [f"{o.variant}, seed {o.seed}" for o in observed])
    expected = {(row.variant, seed) for row in rows for seed in row.seeds}
    by_variant = {name: [o for o in observed if o.variant == name and (name, o.seed) in expected] for name in variants}
    complete = {name: [o for o in cells if o.status == "complete"] for name, cells in by_variant.items()}
    keys = [column.key for column in columns]
    values = {
        key: {name: {o.seed: o.metrics.get(key) for o in cells} for name, cells in complete.items()} for key in keys
    }
    measures = {key: _measures(values[key], baseline) for key in keys}
    contrast_measures = {key: _contrast_measures(values[key], contrasts) for key in keys}
    return Table(
        ablation=ablation,
        base=base,
        baseline=baseline,
        command=command,
        environment=one_or_mixed({o.environment for cells in complete.values() for o in cells if o.environment}),
        rows=tuple(
            _row(row, by_variant[row.variant], {key: measures[key][row.variant] for key in keys}, labels)
            for row in rows
        ),
        columns=tuple(columns),
        summaries={key: _summary(measures[key], baseline) for key in keys},
        contrasts=tuple(
            ContrastRow(c.name, dict(c.weights), {key: contrast_measures[key][c.name] for key in keys})
            for c in contrasts
        ),
        warnings=tuple(warnings),
        notes=tuple(_notes(rows, columns, observed, expected, complete)),
    )


_NOT_COMPARED = Effect(None, None, 0, None, None, None)


def _measures(values: Mapping[str, Mapping[int, float | None]], baseline: str) -> dict[str, Measure]:
    """One metric of every variant; `values` is by variant and seed, complete cells only."""
    effects = {name: paired(seeds, values[baseline]) for name, seeds in values.items() if name != baseline}
    adjusted = _holm(effects)
    measures = {}
    for name, seeds in values.items():
        mean = estimate(seeds)
        kept = {str(seed): value for seed, value in defined(seeds).items()}
        effect = effects.get(name, _NOT_COMPARED)
        measures[name] = Measure(
            mean=mean.mean,
            ci95=mean.ci95,
            n=mean.n,
            undefined=mean.undefined,
            values=kept,
            diff=effect.mean,
            diff_ci95=effect.ci95,
            diff_n=effect.n,
            diff_sd=effect.sd,
            test=effect.test,
            p=effect.p,
            p_adj=adjusted.get(name),
            mde=_detectable(effect),
        )
    return measures


def _contrast_measures(
    values: Mapping[str, Mapping[int, float | None]], contrasts: Sequence[Contrast]
) -> dict[str, ContrastMeasure]:
    effects = {c.name: contrast(values, c.weights) for c in contrasts}
    adjusted = _holm(effects)
    return {
        name: ContrastMeasure(e.mean, e.ci95, e.n, e.test, e.p, adjusted.get(name), _detectable(e))
        for name, e in effects.items()
    }


def _holm(effects: Mapping[str, Effect]) -> dict[str, float]:
    p_values = {name: e.p for name, e in effects.items() if e.p is not None}
    return holm(p_values, family=sum(e.n >= FEWEST_PAIRS for e in effects.values()))


def _detectable(effect: Effect) -> float | None:
    return None if effect.sd is None else minimum_detectable_effect(effect.sd, effect.n)


def _summary(measures: Mapping[str, Measure], baseline: str) -> Summary:
    others = {name: m for name, m in measures.items() if name != baseline}
    compared = sum(m.diff_n >= FEWEST_PAIRS for m in others.values())
    tested = [m for m in others.values() if m.test == "t"]

    def typical(alpha: float) -> float | None:
        # Rows with more seeds find much smaller differences: one median over both would be true of neither.
        fewest = [m for m in tested if m.diff_n == min(m.diff_n for m in tested)]
        effects = [minimum_detectable_effect(m.diff_sd or 0.0, m.diff_n, alpha) for m in fewest]
        return median(e for e in effects if e is not None) if tested else None

    return Summary(
        compared=compared,
        tested=len(tested),
        separates=tuple(name for name, m in others.items() if m.separated),
        pairs=tuple(sorted({m.diff_n for m in others.values() if m.diff_n})),
        undefined=sum(m.undefined for m in measures.values()),
        mde=typical(ALPHA),
        mde_holm=typical(ALPHA / max(compared, 1)),
    )


def _row(info: RowInfo, cells: Sequence[Observation], measures: dict[str, Measure], labels: Sequence[str]) -> TableRow:
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
        labels={label: one_or_mixed({o.labels[label] for o in complete if label in o.labels}) for label in labels},
        note=info.note,
        metrics=measures,
    )


def _notes(
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


def _refuse_repeated(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what}: {name!r} is given twice; keep one")
