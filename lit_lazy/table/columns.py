"""Columns and contrasts of tables, and the columns that this project's tables share.

A table omits columns whose metric no cell has.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lit_lazy.support.checked_fields import PositiveFloat, check_fields, require
from lit_lazy.support.error_messages import short_repr
from lit_lazy.support.names_to_paths import LONGEST_METRIC, is_metric_name
from lit_lazy.table.statistics import RESOLUTION

MOST_DIGITS = 20


@dataclass(frozen=True)
class Column:
    """A metric of the table.

    `digits` is the number of decimals or a format spec such as ",.0f". `scale` multiplies displayed values (100 for a
    percentage, with `unit="%"`); JSON and CSV store raw values. A column with `better` appears in the table of
    differences, a `plotted` one in the figures. `bounds` are the raw limits of the metric: a row whose values all lie
    at a limit has no spread to test with. `by_construction` is the reason why rows differ regardless of training; the
    table then reports it instead of a test. A raw difference within +-`margin` counts as no difference: the table lists
    the rows equivalent to the baseline.
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
    margin: PositiveFloat | None = None

    def __post_init__(self) -> None:
        what = f"column {short_repr(self.key)}"
        check_fields(f"{what}: ", self)
        for name, text in (("key", self.key), ("title", self.title), ("unit", self.unit or "1")):
            _require_printable(f"{what}: {name}", text)
        require(is_metric_name(self.key), f"{what}: key", self.key, "MLflow takes no metric of this name")
        require(self.scale > 0, f"{what}: scale", self.scale, "must be above 0; 1 shows values as they are")
        fix = f"must be 0 to {MOST_DIGITS} decimals or a format such as ',.0f'"
        require(isinstance(self.digits, str) or 0 <= self.digits <= MOST_DIGITS, f"{what}: digits", self.digits, fix)
        try:
            float(self.format(1.0 / self.scale))
        except ValueError:
            require(False, f"{what}: digits", self.digits, fix)

    def format(self, value: float, sign: str = "") -> str:
        """The value as displayed. A nonzero value that would round to 0 is shown with one significant digit."""
        shown = value * self.scale
        text = format(shown, sign + self._spec)
        return format(shown, sign + ".0e") if shown and not float(text.replace(",", "")) else text

    def clip_interval(self, mean: float, half_width: float, values: Collection[float]) -> tuple[float, float]:
        """The ends of an interval around the mean of values, within the least and the greatest bound of the metric.

        A bound that a value exceeds, as the mass of a custom rule may exceed 1, does not hold for these values.
        """
        low, high = mean - half_width, mean + half_width
        if not self.bounds:
            return low, high
        least, greatest = min(self.bounds), max(self.bounds)
        rounding = RESOLUTION * max(map(abs, (*values, *self.bounds)))
        return (
            low if min(values) < least - rounding else max(low, least),
            high if max(values) > greatest + rounding else min(high, greatest),
        )

    def round_value(self, value: float) -> float:
        """The value in the displayed unit, rounded to the displayed digits."""
        return float(format(value * self.scale, self._spec).replace(",", ""))

    @property
    def _spec(self) -> str:
        return f".{self.digits}f" if isinstance(self.digits, int) else self.digits

    @property
    def heading(self) -> str:
        return self.add_unit(self.title, self.unit)

    @property
    def difference_unit(self) -> str:
        """Unit of a difference: percentages differ by points."""
        return "points" if self.unit == "%" else self.unit

    def add_unit(self, title: str, unit: str) -> str:
        """A title with a unit and the direction that is better."""
        return title + (f" ({unit})" if unit else "") + {"lower": " ↓", "higher": " ↑", None: ""}[self.better]


def _require_printable(what: str, text: str) -> None:
    fix = f"must be 1 to {LONGEST_METRIC} printable characters"
    require(0 < len(text) <= LONGEST_METRIC and text.isprintable(), what, text, fix)


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of variants with weights that sum to zero, such as the interaction of a 2x2 design."""

    name: str
    weights: dict[str, float]

    def __post_init__(self) -> None:
        what = f"contrast {short_repr(self.name)}"
        check_fields(f"{what}: ", self)
        _require_printable(f"{what}: name", self.name)
        balanced = any(self.weights.values()) and abs(math.fsum(self.weights.values())) <= 1e-9
        require(balanced, f"{what}: weights", self.weights, "must add up to zero")


SHARE = (0.0, 1.0)
"""Bounds of a fraction."""
STARTS = "rows start at different tau"
OWN = "each rule learns parameters of its own"
LOSS = ("loss/excess", "loss/bits_per_byte")
"""Primary losses: above the Bayes-optimal predictor if the data have one, otherwise per byte."""

NOTES = {
    "loss/excess": "validation loss above the Bayes-optimal predictor's",
    "sink/first_key_weight_non_trigger": "mean weight on the first key at non-trigger rows from position 8 on",
    "sink/first_key_weight": "mean weight on the first key, rows from position 8 on",
    "sink/first_key_share": "weight on the first key / surviving mass over the rows from position 8 on, a ratio of "
    "sums",
    "sink/rate": "heads and sequences whose mean weight on the first key exceeds 0.3 (Gu et al., arXiv 2410.10781); "
    "low where little mass is left",
    "sink/rate_share": "the same of that weight / surviving mass; noise where there is next to no mass",
    "mass/all": "surviving mass of a row, before renormalising",
    "sink/first_key_share_non_trigger": "weight on the first key / surviving mass at non-trigger rows from position 8 "
    "on, a ratio of sums",
    "mass/trigger": "surviving mass of a trigger row, before renormalising",
    "mass/non_trigger": "the same of a non-trigger row",
    "sparsity/zero": "share of visible keys with a weight of exactly 0",
    "sparsity/over_null": "above what Gaussian scores would give, row by row at the row's own variance, keys and "
    "threshold",
    "collapse/effective_rank": "of a sequence's last hidden states: exp of the entropy of their singular values (Roy "
    "and Vetterli 2007)",
    "sink/eviction": "what the loss of later rows rises by when keys 1 to 4 are hidden in every layer",
    "sink/eviction_n_held": "the same with thresholds as they were",
    "sparsity/block_64": "64 x 64 tiles with a visible key and without a weight, which a kernel could skip",
    "mass/empty_rows": "rows without any mass",
    "mass/dead_heads": "heads without any mass from row 2 on",
    "sink/no_operation": "heads and sequences with a sink, at any key of the first half, whose projected value is at "
    "most 0.2 of the others' in size (Fesser et al., arXiv 2606.08105)",
    "sink/broadcast": "those at least 0.5 of the others' in size, in a head whose update has a stable rank of at most "
    "1.5",
    "collapse/max_over_median": "of a sequence's residual stream over the median entry, in the layer where that is "
    "largest",
}
"""What the shared columns measure."""


def _column(key: str, title: str, *more: Any, **shown: Any) -> Column:
    note = "of the same model before training" if key.startswith("init/") else NOTES.get(key, "")
    return Column(key, title, *more, note=note, **shown)


_fraction = partial(_column, bounds=SHARE)
_percentage = partial(_fraction, digits=1, unit="%", scale=100)
_tau = partial(_column, digits=2, by_construction=STARTS)

COLUMNS = (
    _column("loss/excess", "excess loss", "lower", 4, "nats", plotted=True, margin=0.001),
    _column("loss/bits_per_byte", "validation loss", "lower", 4, "bits/byte", plotted=True, margin=0.02),
    _percentage("accuracy/trigger", "trigger accuracy", "higher", digits=2),
    _fraction("sink/first_key_weight_non_trigger", "first-key weight", plotted=True),
    _fraction("sink/first_key_weight", "first-key weight", plotted=True),
    _fraction("sink/first_key_share", "first-key share"),
    _percentage("sink/rate", "sink rate", plotted=True),
    _percentage("sink/rate_share", "sink rate of the share"),
    _fraction("mass/all", "mass"),
    _fraction("sink/first_key_share_non_trigger", "first-key share"),
    _fraction("mass/trigger", "mass, trigger"),
    _fraction("mass/non_trigger", "mass, non-trigger"),
    _percentage("sparsity/zero", "sparsity", plotted=True),
    _percentage("init/sparsity/zero", "sparsity at init", by_construction=STARTS),
    _column("sparsity/over_null", "sparsity over null", digits=1, unit="points", scale=100),
    _column("collapse/effective_rank", "effective rank", digits=1),
    _tau("tau/mean", "tau, mean"),
    _tau("tau/min", "tau, min"),
    _tau("tau/max", "tau, max"),
    _column("model/parameters", "parameters", digits=",.0f"),
)

HEAD_COLUMNS = (
    _column("sink/eviction", "loss without 4 keys", "lower", 4, "nats"),
    _column("sink/eviction_n_held", "loss without 4 keys, n held", "lower", 4, "nats"),
    _percentage("sparsity/block_64", "empty tiles"),
    _percentage("mass/empty_rows", "empty rows"),
    _percentage("mass/dead_heads", "dead heads"),
)
"""Further head metrics that reviewers asked for (R8, R11, R14); measured in every run."""

SINK_COLUMNS = (
    _percentage("sink/no_operation", "no-operation sinks"),
    _percentage("sink/broadcast", "broadcast sinks"),
    _column("collapse/max_over_median", "largest entry", digits=0, unit="medians"),
)
"""Kinds of sinks, and the outliers that come with them; measured in every run."""

INIT_COLUMNS = (
    _fraction("init/sink/first_key_weight_non_trigger", "first-key weight at init"),
    _percentage("init/sink/rate", "sink rate at init"),
    _fraction("init/mass/non_trigger", "mass at init, non-trigger", by_construction=STARTS),
)
"""Metrics of the untrained model, in addition to `init/sparsity/zero` above."""


def list_learned_columns(measured: Iterable[str]) -> list[Column]:
    """Columns of the learned parameters of normalisers, gates and biases among metrics; tau has its own."""
    names = sorted({name.rpartition("/")[0] for name in measured if name.startswith(("learned/", "bias/learned."))})
    return [
        Column(f"{name}/{what}", f"{shorten_learned(name)}, {what}", digits=".3g", by_construction=OWN)
        for name in names
        for what in ("mean", "min", "max")
    ]


def shorten_learned(name: str) -> str:
    """A learned parameter's name for people: `x` of a normaliser, `gate.x` or `bias.x`."""
    return name.removeprefix("learned/").replace("bias/learned.", "bias.")
