"""What do models show that are trained from scratch on 20 tokens a parameter? Five rules at every size of the ladder.

Each rule has its best rate of `frontier_rates` at that size. The questions q_frontier_* share these cells, and declare
which sizes they rest on; the rest of this table is exploratory. `--base` gives other text, whose context is the size's.
"""

import math
from collections.abc import Callable, Iterable
from statistics import fmean

from frontier_rates import LOSS, RULES, SEED
from frontier_rates import ablation as first

from lit_lazy.config import RunConfig
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.config.user_files import experiment
from lit_lazy.data.packages import Packages
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.measure.evaluation import Varied
from lit_lazy.measure.int8 import Int8
from lit_lazy.measure.lengths import Lengths, Streaming
from lit_lazy.measure.retrieval import Needle
from lit_lazy.table.columns import COLUMNS, HEAD_COLUMNS, SINK_COLUMNS
from lit_lazy.table.records import Column

SIZES = ("100k", "300k", "1m", "3m")
PILOT_SEEDS = (SEED,)
SEEDS = tuple(range(100, 120))
COST = "a seed of all sizes and rules costs 4 core-hours"
TIMES = (1, 2, 4)
RATIOS = (5, 80)
"""Further tokens per parameter of the two smallest sizes."""


def loss_at(times: int) -> Column:
    title, note = f"loss at {times}x", f"of all positions, {times} times the training's length"
    return Column(f"length_{times}x/loss", title, "lower", 4, "nats", note=note, margin=0.01)


MEASURED = (
    LOSS,
    Column("validated_packages/loss/val", "loss, other packages", "lower", 4, "nats", margin=0.01),
    *map(loss_at, TIMES),
    Column("length_1x/loss_last_quarter", "loss, last quarter", "lower", 4, "nats", margin=0.01),
    Column("needle/accuracy", "needle", "higher", 1, "%", scale=100, note="found in the context, at five depths"),
    Column("needle/loss", "loss of the needle", "lower", 3, "nats"),
    Column("int8/loss_rise", "loss under int8", "lower", 4, "nats", note="rise with int8 weights and activations"),
    *(column for column in (*COLUMNS, *HEAD_COLUMNS, *SINK_COLUMNS) if column.key != "loss/excess"),
)


def measure_at(context: int) -> Callable[[RunConfig], tuple[Evaluation, ...]]:
    """What is measured of every model of a context; on the packages also those of which nothing was trained on."""
    usual = (
        Lengths(TIMES, sequences=32),
        Streaming((0, 4), window=context // 4, times=2),
        Needle(lengths=(context,)),
        Int8(sequences=32),
    )
    apart = (Varied("validated", ("packages",)),)
    return lambda base: usual + (apart if isinstance(base.data, Packages) and not base.data.path else ())


def make_row(rule: str, size: str) -> Row:
    """A rule at a size of the ladder, at its best rate there."""
    sized = experiment(f"frontier_{size}")
    context = sized.data.outline().context_length
    changes = {
        "model": sized.model,
        "train": sized.train,
        "data.context_length": context,
        "data.validation_windows": sized.data.validation_windows,
        "diagnosed_sequences": sized.diagnosed_sequences,
        "evaluations": measure_at(context),
    }
    row = Row(f"{rule} {size}", changes | RULES[rule], source="ours")
    return at_best_rate(row, of=rule, folder=f"{first.name}-frontier_{size}")
