"""The records of a table: what is asked for, what is known of each cell, and the finished numbers with n and spread."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lit_lazy.support.checks import require
from lit_lazy.support.errors import short_repr
from lit_lazy.support.typecheck import check_kinds
from lit_lazy.table.question import Declaration, Verdict
from lit_lazy.table.statistics import ALPHA, Test

FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")
"""What a formula begins with (OWASP, CSV injection); a number that was measured is no text."""
LONGEST_TEXT = 250
"""Characters of a key, a title or a name; MLflow takes as many of a metric's."""
MOST_DIGITS = 20

Status = Literal["complete", "failed", "missing", "waiting", "running"]

UNFINISHED = ("failed", "missing", "waiting", "running")
"""States of a cell that has no result, the gravest first."""
STATUS_ORDER = (*UNFINISHED, "complete")
"""A row's status is the first of these that one of its cells has."""


@dataclass(frozen=True)
class Column:
    """A metric of the table.

    `digits` is the number of decimals, or a format spec such as ",.0f". `scale` multiplies what is shown (100 for a
    percentage, with `unit="%"`); JSON and CSV keep the raw value. `better` gives the column its place in the table of
    differences, `plotted` in the figure. `bounds` are the raw values that the metric cannot pass: a row that is always
    at one has no spread to test with. `by_construction` says why rows differ in this column whatever they learn: it is
    not tested, and the table says so. A difference within +-`margin`, raw, counts as none: rows equivalent to the
    baseline are named.
    """

    key: str
    title: str
    better: Literal["lower", "higher"] | None = None
    digits: int | str = 3
    unit: str = ""
    scale: float = 1.0
    note: str = ""
    plotted: bool = False
    bounds: tuple[float, ...] = ()
    by_construction: str = ""
    margin: float | None = None

    def __post_init__(self) -> None:
        if self.better not in ("lower", "higher", None):
            raise ValueError(f"better: {self.better!r} of column {self.key!r}; use 'lower', 'higher' or None")
        check_kinds(f"column {short_repr(self.key)}", self)
        for what, text in (("key", self.key), ("title", self.title), ("unit", self.unit or "1")):
            if not _is_printable(text):
                raise ValueError(
                    f"{what}: {text!r} of column {self.key!r}; use 1 to {LONGEST_TEXT} printable characters"
                )
        if self.margin is not None and self.margin <= 0:
            raise ValueError(f"margin: {self.margin} of column {self.key!r}; use a difference above 0, or None")
        if not self.scale:
            raise ValueError(f"scale: 0 of column {self.key!r}; use 1 to show values as they are")
        try:
            if isinstance(self.digits, int) and not 0 <= self.digits <= MOST_DIGITS:
                raise ValueError
            float(self.format(1.0 / self.scale))
        except ValueError:
            raise ValueError(
                f"digits: {self.digits!r} of column {self.key!r}; use a number of decimals or a format such as ',.0f'"
            ) from None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Column":
        """Of what `asdict` gave; keys that are no field are left out, fields that are no key have their default."""
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**known | {"bounds": tuple(known.get("bounds", ()))})

    def format(self, value: float, sign: str = "") -> str:
        """The value as shown; one that would be rounded to 0 is given one significant digit."""
        shown = value * self.scale
        text = format(shown, sign + self._spec)
        return format(shown, sign + ".0e") if shown and not float(text.replace(",", "")) else text

    def round_value(self, value: float) -> float:
        """The value in the unit shown, to the digits shown: what differs in further ones alone is not told apart."""
        return float(format(value * self.scale, self._spec).replace(",", ""))

    @property
    def _spec(self) -> str:
        return f".{self.digits}f" if isinstance(self.digits, int) else self.digits

    @property
    def heading(self) -> str:
        return self.title + self._format_suffix(self.unit)

    @property
    def difference_heading(self) -> str:
        return f"Δ {self.title}{self._format_suffix(self.difference_unit)}"

    @property
    def difference_unit(self) -> str:
        """Two percentages differ by points."""
        return "points" if self.unit == "%" else self.unit

    def _format_suffix(self, unit: str) -> str:
        return (f" ({unit})" if unit else "") + {"lower": " ↓", "higher": " ↑", None: ""}[self.better]


def _is_printable(text: str) -> bool:
    return 0 < len(text) <= LONGEST_TEXT and text.isprintable()


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
        check_kinds(f"contrast {short_repr(self.name)}", self)
        if not _is_printable(self.name):
            raise ValueError(f"name: {self.name!r} of a contrast; use 1 to {LONGEST_TEXT} printable characters")
        if abs(math.fsum(self.weights.values())) > 1e-9 or not any(self.weights.values()):
            raise ValueError(f"weights: {self.weights} of contrast {self.name!r}; give weights that add up to zero")


@dataclass(frozen=True)
class Observation:
    """What is known of one cell. `metrics` counts only when `status` is "complete".

    `environment` says in a line with which versions and on which machine it was trained, `normaliser` and `position`
    are the classes of these, as in `TableRow`.
    """

    variant: str
    seed: int
    status: Literal["complete", "failed", "waiting", "running"]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    git_sha: str = ""
    environment: str = ""
    reason: str = ""
    normaliser: str = ""
    position: str = ""


@dataclass(frozen=True)
class ContrastMeasure:
    """A contrast in one metric, as `statistics.Effect`; Holm's family are the contrasts of that metric."""

    mean: float | None
    ci95: float | None
    n: int
    se: float | None
    df: float | None
    low: float | None
    high: float | None
    test: Test | None
    p: float | None
    p_adj: float | None
    mde: float | None


@dataclass(frozen=True)
class Measure:
    """One metric of one row. `n` cells define it, `undefined` complete cells do not; `values` is by seed.

    `diff` is the difference to the baseline's mean, `diff_n` the seeds of the one with fewer, `diff_se`, `diff_df`,
    `diff_low`, `diff_high` and `test` as in `statistics.Effect`, `p` unadjusted, `p_adj` after Holm over the rows of
    the metric, `mde` the minimum detectable effect at this spread and n. `p_same` is TOST's within the column's margin,
    after Holm over the rows.
    """

    mean: float | None
    ci95: float | None
    n: int
    undefined: int
    values: dict[str, float]
    diff: float | None
    diff_ci95: float | None
    diff_n: int
    diff_se: float | None
    diff_df: float | None
    diff_low: float | None
    diff_high: float | None
    test: Test | None
    p: float | None
    p_adj: float | None
    mde: float | None
    p_same: float | None

    @property
    def difference(self) -> ContrastMeasure:
        return ContrastMeasure(
            self.diff, self.diff_ci95, self.diff_n, self.diff_se, self.diff_df, self.diff_low, self.diff_high,
            self.test, self.p, self.p_adj, self.mde,
        )  # fmt: skip

    @property
    def separated(self) -> bool:
        return self.p_adj is not None and self.p_adj < ALPHA

    @property
    def same(self) -> bool:
        """Equivalent to the baseline, within the column's margin."""
        return self.p_same is not None and self.p_same < ALPHA


@dataclass(frozen=True)
class TableRow:
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
    normaliser: str = ""
    """The class of its normaliser, or of its mixer where that does not attend; empty where no cell is complete."""
    position: str = ""
    """The class of its position; empty where it has none."""

    @property
    def seeds(self) -> list[int]:
        return sorted(seed for seeds in self.cells.values() for seed in seeds)


@dataclass(frozen=True)
class Detectable:
    """The median over the tested rows of `n` seeds of the minimum detectable effect at alpha = 0.05.

    `mde_holm` is the same at Holm's first step, alpha = 0.05 / rows compared.
    """

    n: int
    mde: float
    mde_holm: float


@dataclass(frozen=True)
class Summary:
    """What one column can tell at this scale.

    `compared` is Holm's family: the rows with three seeds or more. `tested` of them have a p value, `separates` names
    those below 0.05 after Holm, `same` those that are equivalent to the baseline within the column's margin, after
    Holm. `seeds` are the numbers of seeds that occur.
    """

    compared: int
    tested: int
    separates: tuple[str, ...]
    same: tuple[str, ...]
    seeds: tuple[int, ...]
    undefined: int
    detectable: tuple[Detectable, ...]


@dataclass(frozen=True)
class ContrastRow:
    name: str
    weights: dict[str, float]
    metrics: dict[str, ContrastMeasure]


@dataclass(frozen=True)
class Table:
    """A finished or unfinished ablation; made by `build_table`, read back by `from_json`.

    `primary` is the key of the column that its question is about; the others are exploratory. None: nothing was named.
    """

    ablation: str
    base: str
    baseline: str
    command: str
    environment: str
    rows: tuple[TableRow, ...]
    columns: tuple[Column, ...]
    summaries: dict[str, Summary]
    contrasts: tuple[ContrastRow, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    primary: str | None = None
    declaration: Declaration | None = None
    """Of the question that the ablation answers, if it does."""
    verdict: Verdict | None = None
    """None, too, while a value is missing that it needs."""
    seconds: float | None = None
    """Of training and evaluating, all complete cells together; of a cell that resumed, since then. None: unknown."""

    @property
    def git_sha(self) -> str:
        """The commit of all complete cells, or "mixed: a, b"."""
        return join_or_mixed({sha for row in self.rows for sha in row.git_shas})

    @property
    def compared(self) -> list[str]:
        """Keys of the primary and the plotted columns, but for those that the baseline's cells have no value in."""
        known = [row for row in self.rows if row.variant == self.baseline and row.n]
        asked = [column for column in self.columns if column.plotted or column.key == self.primary]
        plotted = [column.key for column in sorted(asked, key=lambda column: column.key != self.primary)]
        return [key for key in plotted if all(row.metrics[key].mean is not None for row in known)]

    def to_json(self) -> dict[str, Any]:
        """Strict JSON (no NaN, no infinity); every half-width, p and MDE that does not exist is null."""
        columns = []
        for column in self.columns:
            summary = self.summaries[column.key]
            columns.append(_tuples_to_lists(asdict(column) | asdict(summary)))
        return {
            "ablation": self.ablation,
            "base": self.base,
            "git_sha": self.git_sha,
            "command": self.command,
            "environment": self.environment,
            **({} if self.seconds is None else {"seconds": round(self.seconds)}),
            "baseline": self.baseline,
            "primary": self.primary,
            **({} if self.declaration is None else {"declaration": self.declaration.to_json()}),
            **({} if self.verdict is None else {"verdict": self.verdict.to_json()}),
            "rows": [asdict(row) | {"git_shas": list(row.git_shas)} for row in self.rows],
            "columns": columns,
            "contrasts": [asdict(row) for row in self.contrasts],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Table":
        """Of `to_json`. What a table of an earlier version does not hold is None or empty; `restated` computes it.

        Raises ValueError where two rows are of one variant.
        """

        def pick(kind: type, values: Mapping[str, Any], **changed: Any) -> Any:
            names = kind.__dataclass_fields__
            return kind(**({name: values.get(name) for name in names} | changed))

        rows = tuple(
            pick(
                TableRow,
                {"normaliser": "", "position": ""} | row,
                git_shas=tuple(row["git_shas"]),
                metrics={key: pick(Measure, measure) for key, measure in row["metrics"].items()},
            )
            for row in data["rows"]
        )
        variants = [row.variant for row in rows]
        twice = sorted({variant for variant in variants if variants.count(variant) > 1})
        require(not twice, "rows", twice, "there twice")
        contrasts = tuple(
            pick(
                ContrastRow,
                row,
                metrics={key: pick(ContrastMeasure, measure) for key, measure in row["metrics"].items()},
            )
            for row in data["contrasts"]
        )
        summaries = {
            column["key"]: pick(
                Summary,
                column,
                detectable=tuple(pick(Detectable, at) for at in column.get("detectable", ())),
                **{name: tuple(column.get(name, ())) for name in ("separates", "same", "seeds")},
            )
            for column in data["columns"]
        }
        return pick(
            cls,
            dict(data) | {"summaries": summaries},
            rows=rows,
            columns=tuple(map(Column.from_json, data["columns"])),
            contrasts=contrasts,
            warnings=tuple(data["warnings"]),
            notes=tuple(data["notes"]),
            declaration=Declaration.from_json(data["declaration"]) if data.get("declaration") else None,
            verdict=Verdict.from_json(data["verdict"]) if data.get("verdict") else None,
        )

    def to_csv(self) -> str:
        """Tidy: one line per variant and metric, raw values, empty where there is none.

        `pandas.read_csv(...).pivot(index="variant", columns="metric", values="mean")` is the wide form.
        """
        labels = list(self.rows[0].labels)
        measure = [name for name in Measure.__dataclass_fields__ if name != "values"]
        about = ["ablation", "baseline", "variant", "base", "source", "status", "cells", "complete", "git_sha"]
        lines: list[list[object]] = [[*about, *labels, "metric", "better", *measure]]
        for row in self.rows:
            about = [self.ablation, self.baseline, row.variant, row.base, row.source, row.status]
            about += [len(row.seeds), row.n, join_or_mixed(row.git_shas), *row.labels.values()]
            for column in self.columns:
                values = [getattr(row.metrics[column.key], name) for name in measure]
                lines.append([*about, column.key, column.better, *values])
        return format_csv(lines)


def _tuples_to_lists(data: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from JSON, which has no tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}


def format_csv(lines: Iterable[Sequence[object]]) -> str:
    """CSV of cells; a text that a spreadsheet would take for a formula gets an apostrophe before it."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for line in lines:
        writer.writerow(_escape_formula(value) if isinstance(value, str) else value for value in line)
    return out.getvalue()


def _escape_formula(text: str) -> str:
    line = text.replace("\r", " ")  # which a writer of lines that end in \n does not quote
    return f"'{line}" if line.startswith(FORMULA) else line


def join_or_mixed(values: Iterable[str]) -> str:
    found = sorted(values)
    return f"mixed: {', '.join(found)}" if len(found) > 1 else "".join(found)
