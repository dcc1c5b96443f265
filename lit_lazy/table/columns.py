"""The columns that this project's tables share. A column whose metric no cell has is left out of a table."""

from lit_lazy.table.records import Column

COLUMNS = (
    Column(
        "loss/excess",
        "excess loss",
        "lower",
        4,
        "nats",
        note="validation loss above the Bayes-optimal predictor's",
        plotted=True,
    ),
    Column("loss/bits_per_byte", "validation loss", "lower", 4, "bits/byte", plotted=True),
    Column("accuracy/trigger", "trigger accuracy", "higher", 2, "%", scale=100),
    Column(
        "sink/first_key_weight_non_trigger",
        "first-key weight",
        None,
        3,
        note="mean weight on the first key at non-trigger rows from position 8 on",
        plotted=True,
    ),
    Column(
        "sink/first_key_weight",
        "first-key weight",
        None,
        3,
        note="mean weight on the first key, rows from position 8 on",
        plotted=True,
    ),
    Column(
        "sink/first_key_share",
        "first-key share",
        None,
        3,
        note="weight on the first key / surviving mass over the rows from position 8 on, a ratio of sums",
    ),
    Column(
        "sink/rate",
        "sink rate",
        None,
        1,
        "%",
        scale=100,
        note="heads and sequences whose mean weight on the first key exceeds 0.3 (Gu et al., arXiv 2410.10781); low "
        "where little mass is left",
        plotted=True,
    ),
    Column(
        "sink/rate_share",
        "sink rate of the share",
        None,
        1,
        "%",
        scale=100,
        note="the same of that weight / surviving mass; noise where there is next to no mass",
    ),
    Column("mass/all", "mass", None, 3, note="surviving mass of a row, before renormalising"),
    Column(
        "sink/first_key_share_non_trigger",
        "first-key share",
        None,
        3,
        note="weight on the first key / surviving mass at non-trigger rows from position 8 on, a ratio of sums",
    ),
    Column("mass/trigger", "mass, trigger", None, 3, note="surviving mass of a trigger row, before renormalising"),
    Column("mass/non_trigger", "mass, non-trigger", None, 3, note="the same of a non-trigger row"),
    Column(
        "sparsity/zero",
        "sparsity",
        None,
        1,
        "%",
        scale=100,
        note="share of visible keys with a weight of exactly 0",
        plotted=True,
    ),
    Column("init/sparsity/zero", "sparsity at init", None, 1, "%", scale=100, note="of the same model before training"),
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
        None,
        1,
        note="of a sequence's last hidden states: exp of the entropy of their singular values (Roy and Vetterli 2007)",
    ),
    Column("tau/mean", "tau, mean", None, 2),
    Column("tau/min", "tau, min", None, 2),
    Column("tau/max", "tau, max", None, 2),
    Column("model/parameters", "parameters", None, ",.0f"),
)

INIT_COLUMNS = (
    Column(
        "init/sink/first_key_weight_non_trigger",
        "first-key weight at init",
        None,
        3,
        note="of the same model before training",
    ),
    Column("init/sink/rate", "sink rate at init", None, 1, "%", scale=100, note="of the same model before training"),
    Column("init/mass/non_trigger", "mass at init, non-trigger", None, 3, note="of the same model before training"),
)
"""What the untrained model already shows, beside `init/sparsity/zero` above."""
