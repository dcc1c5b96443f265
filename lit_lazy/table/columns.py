"""The columns that this project's tables share. A table omits columns whose metric no cell has."""

from collections.abc import Iterable
from functools import partial

from lit_lazy.table.records import Column

SHARE = (0.0, 1.0)
"""Bounds of a fraction."""
STARTS = "rows start at different tau"
OWN = "each rule learns parameters of its own"
AT_INIT = "of the same model before training"
LOSS = ("loss/excess", "loss/bits_per_byte")
"""Primary losses: above the Bayes-optimal predictor if the data have one, otherwise per byte."""

_fraction = partial(Column, bounds=SHARE)
_percentage = partial(_fraction, digits=1, unit="%", scale=100)
_tau = partial(Column, digits=2, by_construction=STARTS)

COLUMNS = (
    Column(
        "loss/excess",
        "excess loss",
        "lower",
        4,
        "nats",
        note="validation loss above the Bayes-optimal predictor's",
        plotted=True,
        margin=0.001,
    ),
    Column("loss/bits_per_byte", "validation loss", "lower", 4, "bits/byte", plotted=True, margin=0.02),
    _percentage("accuracy/trigger", "trigger accuracy", "higher", digits=2),
    _fraction(
        "sink/first_key_weight_non_trigger",
        "first-key weight",
        note="mean weight on the first key at non-trigger rows from position 8 on",
        plotted=True,
    ),
    _fraction(
        "sink/first_key_weight",
        "first-key weight",
        note="mean weight on the first key, rows from position 8 on",
        plotted=True,
    ),
    _fraction(
        "sink/first_key_share",
        "first-key share",
        note="weight on the first key / surviving mass over the rows from position 8 on, a ratio of sums",
    ),
    _percentage(
        "sink/rate",
        "sink rate",
        note="heads and sequences whose mean weight on the first key exceeds 0.3 (Gu et al., arXiv 2410.10781); low "
        "where little mass is left",
        plotted=True,
    ),
    _percentage(
        "sink/rate_share",
        "sink rate of the share",
        note="the same of that weight / surviving mass; noise where there is next to no mass",
    ),
    _fraction("mass/all", "mass", note="surviving mass of a row, before renormalising"),
    _fraction(
        "sink/first_key_share_non_trigger",
        "first-key share",
        note="weight on the first key / surviving mass at non-trigger rows from position 8 on, a ratio of sums",
    ),
    _fraction("mass/trigger", "mass, trigger", note="surviving mass of a trigger row, before renormalising"),
    _fraction("mass/non_trigger", "mass, non-trigger", note="the same of a non-trigger row"),
    _percentage("sparsity/zero", "sparsity", note="share of visible keys with a weight of exactly 0", plotted=True),
    _percentage("init/sparsity/zero", "sparsity at init", note=AT_INIT, by_construction=STARTS),
    Column(
        "sparsity/over_null",
        "sparsity over null",
        None,
        1,
        "points",
        scale=100,
        note="above what Gaussian scores would give, row by row at the row's own variance, keys and threshold",
    ),
    Column(
        "collapse/effective_rank",
        "effective rank",
        digits=1,
        note="of a sequence's last hidden states: exp of the entropy of their singular values (Roy and Vetterli 2007)",
    ),
    _tau("tau/mean", "tau, mean"),
    _tau("tau/min", "tau, min"),
    _tau("tau/max", "tau, max"),
    Column("model/parameters", "parameters", digits=",.0f"),
)


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


HEAD_COLUMNS = (
    Column(
        "sink/eviction",
        "loss without 4 keys",
        "lower",
        4,
        "nats",
        note="what the loss of later rows rises by when keys 1 to 4 are hidden in every layer",
    ),
    Column(
        "sink/eviction_n_held",
        "loss without 4 keys, n held",
        "lower",
        4,
        "nats",
        note="the same with thresholds as they were",
    ),
    _percentage(
        "sparsity/block_64",
        "empty tiles",
        note="64 x 64 tiles with a visible key and without a weight, which a kernel could skip",
    ),
    _percentage("mass/empty_rows", "empty rows", note="rows without any mass"),
    _percentage("mass/dead_heads", "dead heads", note="heads without any mass from row 2 on"),
)
"""Further head metrics that reviewers asked for (R8, R11, R14); measured in every run."""

SINK_COLUMNS = (
    _percentage(
        "sink/no_operation",
        "no-operation sinks",
        note="heads and sequences with a sink, at any key of the first half, whose projected value is at most 0.2 of "
        "the others' in size (Fesser et al., arXiv 2606.08105)",
    ),
    _percentage(
        "sink/broadcast",
        "broadcast sinks",
        note="those at least 0.5 of the others' in size, in a head whose update has a stable rank of at most 1.5",
    ),
    Column(
        "collapse/max_over_median",
        "largest entry",
        digits=0,
        unit="medians",
        note="of a sequence's residual stream over the median entry, in the layer where that is largest",
    ),
)
"""Kinds of sinks, and the outliers that come with them; measured in every run."""

INIT_COLUMNS = (
    _fraction("init/sink/first_key_weight_non_trigger", "first-key weight at init", note=AT_INIT),
    _percentage("init/sink/rate", "sink rate at init", note=AT_INIT),
    _fraction("init/mass/non_trigger", "mass at init, non-trigger", note=AT_INIT, by_construction=STARTS),
)
"""Metrics of the untrained model, in addition to `init/sparsity/zero` above."""
