"""The table of an ablation: numbers with n, spread and a test from finished cells, as Markdown, CSV, LaTeX and HTML.

`build_table` computes, `Table` holds and renders. All renderings but CSV share one list of blocks and differ in
escaping and layout alone. The statistics are those of `lit_lazy.grid.statistics`.
"""

import csv
import html
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from lit_lazy.grid.statistics import (
    ALPHA,
    FEWEST_PAIRS,
    POWER,
    Effect,
    contrast,
    defined,
    estimate,
    holm,
    minimum_detectable_effect,
    paired,
)

Status = Literal["complete", "failed", "missing", "waiting", "running"]
STATUS_ORDER: tuple[Status, ...] = ("failed", "missing", "waiting", "running", "complete")
"""A row's status is the first of these that one of its cells has."""

NOT_DEFINED = "–"


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
        unit = f" ({self.unit})" if self.unit else ""
        return self.title + unit + {"lower": " ↓", "higher": " ↑", None: ""}[self.better]


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
        return "\n\n".join(_markdown(block, width) for block in _blocks(self)) + "\n"

    def latex(self, width: int = 120) -> str:
        """Paragraphs and `tabular`s for \\input, with \\usepackage{booktabs}; split like `markdown`."""
        return "\n\n".join(_latex(block, width) for block in _blocks(self)) + "\n"

    def html(self) -> str:
        """One ASCII `<section>` that carries its style: no script, no link; takes its colours from the page around."""
        body = "\n".join(_html(block) for block in _blocks(self))
        text = f'<section class="ablation-table">\n<style>{_STYLE}</style>\n{body}\n</section>\n'
        return text.encode("ascii", "xmlcharrefreplace").decode()


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


# What is shown: blocks of plain text, escaped by each renderer.


@dataclass(frozen=True)
class _Heading:
    text: str
    level: int


@dataclass(frozen=True)
class _Text:
    text: str
    warning: bool = False


@dataclass(frozen=True)
class _List:
    items: tuple[str, ...]


@dataclass(frozen=True)
class _Grid:
    """`rows` and `header` have equal lengths; the first `words` columns are words, the others numbers."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int

    def split(self, width: int) -> "list[_Grid]":
        """Grids of at most `width` characters each (if two columns fit), every one led by the first column."""
        sizes = [max(len(line[i]) for line in (self.header, *self.rows)) + 3 for i in range(len(self.header))]
        parts: list[list[int]] = [[0]]
        for i in range(1, len(sizes)):
            if len(parts[-1]) > 1 and sum(sizes[j] for j in parts[-1]) + sizes[i] + 1 > width:
                parts.append([0])
            parts[-1].append(i)
        return [
            _Grid(
                tuple(self.header[i] for i in part),
                tuple(tuple(row[i] for i in part) for row in self.rows),
                sum(i < self.words for i in part),
            )
            for part in parts
        ]


_Block = _Heading | _Text | _List | _Grid


def _blocks(table: Table) -> list[_Block]:
    directed = [column for column in table.columns if column.better]
    blocks: list[_Block] = [_Heading(table.ablation, 2)]
    blocks += [_Text(text, warning=True) for text in (*table.warnings, *_incomplete(table))]
    blocks += [_Text(_provenance(table)), _means(table), _Text(_LEGEND)]
    if directed and len(table.rows) > 1:
        others = [row for row in table.rows if row.variant != table.baseline]
        cells = [(row.variant, *(_difference(row, column) for column in directed)) for row in others]
        blocks += [_Heading(f"Differences to {table.baseline}", 3), _effects("Variant", directed, cells)]
        blocks.append(_Text(_DIFFERENCE_LEGEND))
    if directed and table.contrasts:
        cells = [
            (row.name, *(_effect(m.mean, m.ci95, m.test, m.p_adj, c) for c in directed for m in [row.metrics[c.key]]))
            for row in table.contrasts
        ]
        blocks += [_Heading("Contrasts", 3), _effects("Contrast", directed, cells)]
        blocks.append(_List(tuple(f"{row.name} = {_weights(row.weights)}" for row in table.contrasts)))
    blocks += [
        _Heading("What each column can separate at this scale", 3),
        _List(tuple(_verdict(table, column) for column in table.columns)),
        _Text(_MDE_LEGEND),
    ]
    for title, items in (
        ("Cells without a result", _unfinished(table)),
        ("Commits", _commits(table)),
        ("Notes", list(table.notes)),
    ):
        if items:
            blocks += [_Heading(title, 3), _List(tuple(items))]
    return blocks


_LEGEND = (
    "Mean ± half-width of the 95 % t interval over seeds, which knows nothing of a metric's bounds; (n=…) where a "
    "metric is defined in fewer cells than the row has complete; = the same value in every seed, so no spread was "
    "measured; – not defined; * differs from the baseline (paired t over common seeds, p < 0.05 after Holm over the "
    "rows of the metric). ↓ lower, ↑ higher is better."
)
_DIFFERENCE_LEGEND = (
    "Row minus baseline, paired over common seeds, ± half-width of the unadjusted 95 % t interval; p after Holm, none "
    "below three pairs. tie: exactly 0 in every seed; = the same difference in every seed: exact for a deterministic "
    "quantity, untestable for a random one, so no p. – no common seed in which both are defined."
)
_MDE_LEGEND = (
    f"Detectable: the true difference that a paired two-sided t test at level {ALPHA} finds with power {POWER}, given "
    "the spread of the differences seen here (noncentral t; median over the tested rows). Holm's first step tests at "
    f"{ALPHA} divided by the number of rows compared."
)


def _incomplete(table: Table) -> list[str]:
    total = sum(len(row.seeds) for row in table.rows)
    done = sum(row.n for row in table.rows)
    if done == total:
        return []
    counts = {status: sum(len(row.cells.get(status, [])) for row in table.rows) for status in STATUS_ORDER[:-1]}
    rest = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return [f"Not complete: {done} of {total} cells have a result ({rest})."]


def _provenance(table: Table) -> str:
    variants: dict[tuple[int, ...], list[str]] = {}
    for row in table.rows:
        variants.setdefault(tuple(row.seeds), []).append(row.variant)
    common, *others = sorted(variants, key=lambda seeds: -len(variants[seeds]))
    seed_text = ", ".join(map(str, common))
    for seeds in others:
        seed_text += f"; {', '.join(map(str, seeds))} in {', '.join(variants[seeds])}"
    about = f"Base: {table.base}. Baseline: {table.baseline}. Seeds: {seed_text}. Commit: {table.git_sha or 'unknown'}."
    made_with = f" With {table.environment}." if table.environment else ""
    return f"{about}{made_with} Made by: {table.command}"


def _means(table: Table) -> _Grid:
    labels = list(table.rows[0].labels)
    bases = ["Base"] if any(row.base != table.base for row in table.rows) else []
    rows = [
        (
            row.variant,
            row.source,
            *(row.base for _ in bases),
            *(row.labels[label] for label in labels),
            str(row.n) if row.n == len(row.seeds) else f"{row.n}/{len(row.seeds)}",
            *(_mean(row, column) for column in table.columns),
        )
        for row in table.rows
    ]
    header = ("Variant", "Source", *bases, *labels, "n", *(column.heading for column in table.columns))
    return _Grid(header, tuple(rows), 2 + len(bases) + len(labels))


def _mean(row: Row, column: Column) -> str:
    m = row.metrics[column.key]
    if m.mean is None:
        return NOT_DEFINED if row.n else row.status
    text = column.format(m.mean)
    if m.ci95 is not None:
        text += f" ±{column.format(m.ci95)}" if m.ci95 else " ="
    if m.n != row.n:
        text += f" (n={m.n})"
    return text + "*" * m.separated


def _effects(first: str, columns: Sequence[Column], cells: Sequence[tuple[str, ...]]) -> _Grid:
    return _Grid((first, *("Δ " + column.heading for column in columns)), tuple(cells), 1)


def _difference(row: Row, column: Column) -> str:
    m = row.metrics[column.key]
    return _effect(m.diff, m.diff_ci95, m.test, m.p_adj, column) if row.n else row.status


def _effect(mean: float | None, ci95: float | None, test: str | None, p_adj: float | None, column: Column) -> str:
    if mean is None:
        return NOT_DEFINED
    if test == "tie":
        return "tie"
    text = column.format(mean, "+")
    if ci95 is not None:
        text += " =" if test == "constant" else f" ±{column.format(ci95)}"
    if p_adj is not None:
        text += f", {_p(p_adj)}" + "*" * (p_adj < ALPHA)
    return text


def _p(p: float) -> str:
    """Three decimals; a fourth where three would hide on which side of 0.05 it lies."""
    if p < 0.001:
        return "p<0.001"
    return f"p={p:.4f}" if f"{p:.3f}" == f"{ALPHA:.3f}" else f"p={p:.3f}"


def _weights(weights: Mapping[str, float]) -> str:
    return " ".join(f"{weight:+g} {variant}" for variant, weight in weights.items())


def _verdict(table: Table, column: Column) -> str:
    s = table.summaries[column.key]
    head = f"{column.title}: "
    if not s.pairs:
        return head + "nothing to compare, no row shares a seed with the baseline in which both are defined."
    if not s.compared:
        return head + f"no test, at most {max(s.pairs)} common seed(s) with the baseline; three are needed."
    if not s.tested:
        return head + "no test, every difference over three or more seeds is the same in each."
    text = f"{head}separates {len(s.separates)} of {s.compared} rows from {table.baseline} (Holm p < {ALPHA})"
    measures = {row.variant: row.metrics[column.key] for row in table.rows}
    above = [name for name in s.separates if (measures[name].diff or 0.0) > 0]
    below = [name for name in s.separates if name not in above]
    words = {"lower": ("worse", "better"), "higher": ("better", "worse"), None: ("higher", "lower")}[column.better]
    groups = [f"{word}: {', '.join(names)}" for word, names in zip(words, (above, below), strict=True) if names]
    text += "".join(f"; {group}" for group in groups)
    if s.tested < s.compared:
        text += f"; {s.compared - s.tested} the same in every seed"
    unit = f" {column.unit}" if column.unit else ""
    pairs = [str(n) for n in s.pairs if n >= FEWEST_PAIRS]
    if s.mde is not None and s.mde_holm is not None:
        text += f". Detectable at n = {pairs[0]}: {column.format(s.mde)}{unit}; at Holm's first step: "
        text += f"{column.format(s.mde_holm)}{unit}."
    return text


def _unfinished(table: Table) -> list[str]:
    items = []
    for row in table.rows:
        for status in STATUS_ORDER[:-1]:
            for seed in row.cells.get(status, []):
                reason = row.reasons.get(str(seed))
                items.append(f"{row.variant}, seed {seed}: {status}" + (f" ({reason})" if reason else ""))
    return items


def _commits(table: Table) -> list[str]:
    shas = sorted({sha for row in table.rows for sha in row.git_shas})
    dirty = [sha for sha in shas if sha.endswith("-dirty")]
    if len(shas) < 2 and not dirty:
        return []
    items = []
    if len(shas) > 1:
        items.append("The cells come from different commits, so a difference may come from the code:")
    for sha in shas:
        where = ", ".join(row.variant for row in table.rows if sha in row.git_shas)
        items.append(f"{sha}: {where}" + (" (with uncommitted changes)" if sha in dirty else ""))
    return items


# Markdown


def _markdown_escape(text: str) -> str:
    """Escapes only what would open markup, so that `p<0.001` and snake_case stay readable in a terminal."""
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    text = re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)
    text = re.sub(r"([\\|`\[\]])", r"\\\1", text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
    return re.sub(r"\*(?=\S)", r"\\*", text)


def _markdown(block: _Block, width: int) -> str:
    match block:
        case _Heading(text, level):
            return "#" * level + " " + _markdown_escape(text)
        case _Text(text, warning):
            return f"> **Warning:** {_markdown_escape(text)}" if warning else _markdown_escape(text)
        case _List(items):
            return "\n".join(f"- {_markdown_escape(item)}" for item in items)
        case _Grid():
            return "\n\n".join(_markdown_grid(part) for part in block.split(width))


def _markdown_grid(grid: _Grid) -> str:
    lines = [[_markdown_escape(cell) for cell in line] for line in (grid.header, *grid.rows)]
    for i in range(grid.words, len(grid.header)):
        # A marker at the end of some numbers must not push their digits out of line.
        if any(line[i].endswith("*") for line in lines):
            for line in lines[1:]:
                line[i] += "" if line[i].endswith("*") else " "
    sizes = [max(3, *(len(line[i]) for line in lines)) for i in range(len(grid.header))]

    def join(cells: Sequence[str]) -> str:
        padded = (
            c.ljust(s) if i < grid.words else c.rjust(s) for i, (c, s) in enumerate(zip(cells, sizes, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * s if i < grid.words else "-" * (s - 1) + ":" for i, s in enumerate(sizes)]
    return "\n".join([join(lines[0]), join(rule), *(join(line) for line in lines[1:])])


# LaTeX

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "_": r"\_", "#": r"\#", "$": r"\$",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "±": r"$\pm$", "Δ": r"$\Delta$", "↓": r"$\downarrow$", "↑": r"$\uparrow$", "–": "--",
    "…": r"\dots{}", "θ": r"$\theta$", "τ": r"$\tau$", "*": r"$^{*}$",
}  # fmt: skip


def _latex_escape(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", escaped)


def _latex(block: _Block, width: int) -> str:
    match block:
        case _Heading(text, _):
            return rf"\paragraph*{{{_latex_escape(text)}}}"
        case _Text(text, warning):
            return rf"\textbf{{Warning: {_latex_escape(text)}}}\par" if warning else _latex_escape(text) + r"\par"
        case _List(items):
            body = "\n".join(rf"  \item {_latex_escape(item)}" for item in items)
            return f"\\begin{{itemize}}\n{body}\n\\end{{itemize}}"
        case _Grid():
            return "\n\n".join(_latex_grid(part) for part in block.split(width))


def _latex_grid(grid: _Grid) -> str:
    def join(cells: Sequence[str]) -> str:
        return "  " + " & ".join(map(_latex_escape, cells)) + r" \\"

    form = "l" * grid.words + "r" * (len(grid.header) - grid.words)
    lines = [rf"\begin{{tabular}}{{{form}}}", r"  \toprule", join(grid.header), r"  \midrule"]
    lines += [*map(join, grid.rows), r"  \bottomrule", r"\end{tabular}\par"]
    return "\n".join(lines)


# HTML

_STYLE = """
.ablation-table { font: 14px/1.45 system-ui, sans-serif; color: inherit; }
.ablation-table .grid { overflow-x: auto; margin: 1em 0; }
.ablation-table table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
.ablation-table th, .ablation-table td { padding: .3em .7em; border-bottom: 1px solid rgba(128, 128, 128, .35); }
.ablation-table th { text-align: left; border-bottom-width: 2px; }
.ablation-table .number { text-align: right; }
.ablation-table .warning { padding: .5em .8em; border-left: 4px solid #d55e00; background: rgba(213, 94, 0, .15); }
"""


def _html_escape(text: str) -> str:
    return html.escape(re.sub(r"\s+", " ", text))


def _html(block: _Block) -> str:
    match block:
        case _Heading(text, level):
            return f"<h{level}>{_html_escape(text)}</h{level}>"
        case _Text(text, warning):
            body = _html_escape(text)
            return f'<p class="warning"><strong>Warning:</strong> {body}</p>' if warning else f"<p>{body}</p>"
        case _List(items):
            return "<ul>" + "".join(f"<li>{_html_escape(item)}</li>" for item in items) + "</ul>"
        case _Grid():
            return _html_grid(block)


def _html_grid(grid: _Grid) -> str:
    def join(cells: Sequence[str], tag: str) -> str:
        kinds = ("" if i < grid.words else ' class="number"' for i in range(len(cells)))
        inner = "".join(f"<{tag}{k}>{_html_escape(c)}</{tag}>" for k, c in zip(kinds, cells, strict=True))
        return f"<tr>{inner}</tr>"

    body = "\n".join(join(row, "td") for row in grid.rows)
    head = join(grid.header, "th")
    return f'<div class="grid"><table>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'
