"""The table of an ablation: numbers with n, spread and a test from finished cells, as Markdown, CSV, LaTeX and HTML.

`build_table` computes, `Table` holds, `lit_lazy.grid.render` shows. The statistics are those of
`lit_lazy.grid.statistics`.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from lit_lazy.grid import render
from lit_lazy.grid.statistics import (
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

Status = Literal["complete", "failed", "missing", "waiting", "running"]
STATUS_ORDER = (*render.UNFINISHED, "complete")
"""A row's status is the first of these that one of its cells has."""


@dataclass(frozen=True)
class Column:
    """A metric of the table.

    `digits` is the number of decimals, or a format spec such as ",.0f". `scale` multiplies what is shown (100 for a
    percentage, with `unit="%"`); JSON and CSV keep the raw value. `better` gives the column its place in the table of
    differences, `plotted` in the figure.
    """

    key: str
    title: str
    better: Literal["lower", "higher"] | None = None
    digits: int | str = 3
    unit: str = ""
    scale: float = 1.0
    note: str = ""
    plotted: bool = False

    def __post_init__(self) -> None:
        if self.better not in ("lower", "higher", None):
            raise ValueError(f"better: {self.better!r} of column {self.key!r}; use 'lower', 'higher' or None")
        try:
            float(self.format(1.0))
        except ValueError:
            raise ValueError(
                f"digits: {self.digits!r} of column {self.key!r}; use a number of decimals or a format such as ',.0f'"
            ) from None

    def format(self, value: float, sign: str = "") -> str:
        """The value as shown; one that would be rounded to 0 is given one significant digit."""
        shown = value * self.scale
        text = format(shown, sign + (f".{self.digits}f" if isinstance(self.digits, int) else self.digits))
        return format(shown, sign + ".0e") if shown and not float(text.replace(",", "")) else text

    @property
    def heading(self) -> str:
        return self.title + self._signs(self.unit)

    @property
    def difference_heading(self) -> str:
        return f"Δ {self.title}{self._signs(self.difference_unit)}"

    @property
    def difference_unit(self) -> str:
        """Two percentages differ by points."""
        return "points" if self.unit == "%" else self.unit

    def _signs(self, unit: str) -> str:
        return (f" ({unit})" if unit else "") + {"lower": " ↓", "higher": " ↑", None: ""}[self.better]


@dataclass(frozen=True)
class RowInfo:
    """A variant that the ablation asks for: where it comes from and the seeds it is to be run with."""

    variant: str
    source: str
    seeds: tuple[int, ...]
    base: str
    note: str = ""


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of variants whose weights add up to zero, such as the interaction of a 2x2 design."""

    name: str
    weights: dict[str, float]

    def __post_init__(self) -> None:
        if abs(math.fsum(self.weights.values())) > 1e-9 or not any(self.weights.values()):
            raise ValueError(f"weights: {self.weights} of contrast {self.name!r}; give weights that add up to zero")


@dataclass(frozen=True)
class Observation:
    """What is known of one cell. `metrics` counts only when `status` is "complete".

    `environment` says in a line with which versions and on which machine it was trained.
    """

    variant: str
    seed: int
    status: Literal["complete", "failed", "waiting", "running"]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    git_sha: str = ""
    environment: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Measure:
    """One metric of one row. `n` cells define it, `undefined` complete cells do not; `values` is by seed.

    `diff` is the paired difference to the baseline over `diff_n` common seeds, `diff_sd` its standard deviation, `test`
    as in `statistics.Effect`, `p` unadjusted, `p_adj` after Holm over the rows of the metric, `mde` the minimum
    detectable effect at this spread and n.
    """

    mean: float | None
    ci95: float | None
    n: int
    undefined: int
    values: dict[str, float]
    diff: float | None
    diff_ci95: float | None
    diff_n: int
    diff_sd: float | None
    test: Literal["t", "tie", "constant"] | None
    p: float | None
    p_adj: float | None
    mde: float | None

    @property
    def separated(self) -> bool:
        return self.p_adj is not None and self.p_adj < ALPHA


@dataclass(frozen=True)
class Row:
    """A variant's results. `n` counts complete cells, `cells` lists the expected seeds by status."""

    variant: str
    base: str
    source: str
    n: int
    status: Status
    cells: dict[str, list[int]]
    reasons: dict[str, str]
    git_shas: tuple[str, ...]
    labels: dict[str, str]
    note: str
    metrics: dict[str, Measure]

    @property
    def seeds(self) -> list[int]:
        return sorted(seed for seeds in self.cells.values() for seed in seeds)


@dataclass(frozen=True)
class Summary:
    """What one column can tell at this scale.

    `compared` is Holm's family: the rows with three pairs or more. `tested` of them have a p value, `separates` names
    those below 0.05 after Holm. `pairs` are the numbers of pairs that occur. `mde` is the median over the tested rows
    with the fewest pairs of the minimum detectable effect at alpha = 0.05, `mde_holm` the same at Holm's first step,
    alpha = 0.05 / compared.
    """

    compared: int
    tested: int
    separates: tuple[str, ...]
    pairs: tuple[int, ...]
    undefined: int
    mde: float | None
    mde_holm: float | None


@dataclass(frozen=True)
class ContrastMeasure:
    """A contrast in one metric; Holm's family are the contrasts of that metric."""

    mean: float | None
    ci95: float | None
    n: int
    test: Literal["t", "tie", "constant"] | None
    p: float | None
    p_adj: float | None
    mde: float | None


@dataclass(frozen=True)
class ContrastRow:
    name: str
    weights: dict[str, float]
    metrics: dict[str, ContrastMeasure]


@dataclass(frozen=True)
class Table:
    """A finished or unfinished ablation; made by `build_table`, read back by `from_json`."""

    ablation: str
    base: str
    baseline: str
    command: str
    environment: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    summaries: dict[str, Summary]
    contrasts: tuple[ContrastRow, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def git_sha(self) -> str:
        """The commit of all complete cells, or "mixed: a, b"."""
        return _one_or_mixed({sha for row in self.rows for sha in row.git_shas})

    def to_json(self) -> dict[str, Any]:
        """Strict JSON (no NaN, no infinity); every half-width, p and MDE that does not exist is null."""
        columns = []
        for column in self.columns:
            summary = self.summaries[column.key]
            lists = {"separates": list(summary.separates), "pairs": list(summary.pairs)}
            columns.append(asdict(column) | asdict(summary) | lists)
        return {
            "ablation": self.ablation,
            "base": self.base,
            "git_sha": self.git_sha,
            "command": self.command,
            "environment": self.environment,
            "baseline": self.baseline,
            "rows": [asdict(row) | {"git_shas": list(row.git_shas)} for row in self.rows],
            "columns": columns,
            "contrasts": [asdict(row) for row in self.contrasts],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Table":
        def pick(kind: type, values: Mapping[str, Any], **changed: Any) -> Any:
            names = kind.__dataclass_fields__
            return kind(**({name: values[name] for name in names} | changed))

        rows = tuple(
            pick(
                Row,
                row,
                git_shas=tuple(row["git_shas"]),
                metrics={key: pick(Measure, measure) for key, measure in row["metrics"].items()},
            )
            for row in data["rows"]
        )
        contrasts = tuple(
            pick(
                ContrastRow,
                row,
                metrics={key: pick(ContrastMeasure, measure) for key, measure in row["metrics"].items()},
            )
            for row in data["contrasts"]
        )
        summaries = {
            column["key"]: pick(Summary, column, separates=tuple(column["separates"]), pairs=tuple(column["pairs"]))
            for column in data["columns"]
        }
        return pick(
            cls,
            dict(data) | {"summaries": summaries},
            rows=rows,
            columns=tuple(pick(Column, column) for column in data["columns"]),
            contrasts=contrasts,
            warnings=tuple(data["warnings"]),
            notes=tuple(data["notes"]),
        )

    def csv(self) -> str:
        """Tidy: one line per variant and metric, raw values, empty where there is none.

        `pandas.read_csv(...).pivot(index="variant", columns="metric", values="mean")` is the wide form.
        """
        labels = list(self.rows[0].labels)
        measure = [name for name in Measure.__dataclass_fields__ if name != "values"]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        about = ["ablation", "baseline", "variant", "base", "source", "status", "cells", "complete", "git_sha"]
        writer.writerow([*about, *labels, "metric", "better", *measure])
        for row in self.rows:
            about = [self.ablation, self.baseline, row.variant, row.base, row.source, row.status]
            about += [len(row.seeds), row.n, _one_or_mixed(row.git_shas), *row.labels.values()]
            for column in self.columns:
                values = [getattr(row.metrics[column.key], name) for name in measure]
                writer.writerow([*about, column.key, column.better, *values])
        return out.getvalue()

    def markdown(self, width: int = 120) -> str:
        """Aligned in a terminal, valid on GitHub. A grid wider than `width` goes on in a further one."""
        return render.markdown(self, width)

    def latex(self, width: int = 120) -> str:
        """Paragraphs and `tabular`s for \\input, with \\usepackage{booktabs}; split like `markdown`."""
        return render.latex(self, width)

    def html(self) -> str:
        """One ASCII `<section>` that carries its style: no script, no link; takes its colours from the page around."""
        return render.html(self)


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
        environment=_one_or_mixed({o.environment for cells in complete.values() for o in cells if o.environment}),
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


def _row(info: RowInfo, cells: Sequence[Observation], measures: dict[str, Measure], labels: Sequence[str]) -> Row:
    status: dict[int, Status] = dict.fromkeys(info.seeds, "missing")
    status |= {o.seed: o.status for o in cells}
    complete = [o for o in cells if o.status == "complete"]
    return Row(
        variant=info.variant,
        base=info.base,
        source=info.source,
        n=len(complete),
        status=next((s for s in STATUS_ORDER if s in status.values()), "missing"),
        cells={s: sorted(seed for seed in status if status[seed] == s) for s in STATUS_ORDER if s in status.values()},
        reasons={str(o.seed): o.reason for o in cells if o.reason},
        git_shas=tuple(sorted({o.git_sha for o in complete if o.git_sha})),
        labels={label: _one_or_mixed({o.labels[label] for o in complete if label in o.labels}) for label in labels},
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


def _one_or_mixed(values: Iterable[str]) -> str:
    found = sorted(values)
    return f"mixed: {', '.join(found)}" if len(found) > 1 else "".join(found)


def _refuse_repeated(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what}: {name!r} is given twice; keep one")
