"""What do models show that are trained from scratch on 20 tokens a parameter? Five rules at every size of a ladder.

Each rule has its best rate of `frontier_rates` at that size; a size joins when the table of its rates is committed. The
questions q_frontier_* rest on the cells of SIZES, which they take from here; this table is exploratory.
"""

from collections.abc import Callable, Sequence

from frontier_rates import LOSS, RULES

from lit_lazy.config import RunConfig
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import experiment
from lit_lazy.data.packages import Packages
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.stages import FirstStageMissing, at_rate, find_best_rates
from lit_lazy.measure.evaluation import Varied
from lit_lazy.measure.int8 import Int8
from lit_lazy.measure.lengths import Lengths, Streaming
from lit_lazy.measure.retrieval import Needle
from lit_lazy.table.columns import COLUMNS, HEAD_COLUMNS, SINK_COLUMNS
from lit_lazy.table.records import Column

SIZES = ("100k", "300k")
"""Those of the questions: what two cores train in days."""
EXPLORED = ("1m", "3m")
"""Sizes for a GPU; they join the table, and no verdict, once their rates are committed."""
LARGER = {"10m": "3m", "30m": "3m"}
"""Sizes that take each rule's rate of another size, times the ratio of the widths."""
ASKED = ("softmax", "softmax + bias", "lazy")
"""Rules of the questions."""
TOKENS_PER_PARAMETER = 20
"""Of the experiments."""
RATIOS = (5, 80)
"""Further tokens per parameter of the two smallest sizes."""
SEEDS = tuple(range(100, 120))
FEW = SEEDS[:2]
TIMES = (1, 2, 4)


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


def count_parameters(size: str) -> int:
    """Weights of the blocks' matrices."""
    model = experiment(f"frontier_{size}").model
    return model.n_layers * model.d_model * (4 * model.d_model + 3 * model.d_ff)


def find_rate(rule: str, size: str, width: int) -> tuple[float, str]:
    """The learning rate of a rule at a size, and where it is from."""
    tuned = LARGER.get(size, size)
    folder = f"frontier_rates-frontier_{tuned}"
    best = find_best_rates(folder)[rule]
    if tuned == size:
        return best, f"learning rate {best:g}, the best of {rule} in {folder}"
    rate = best * experiment(f"frontier_{tuned}").model.d_model / width
    return rate, f"learning rate {rate:g}: {best:g}, the best of {rule} in {folder}, by width"


def is_rated(rule: str, size: str) -> bool:
    """Whether the best rate of a rule at a size is committed."""
    try:
        return rule in find_best_rates(f"frontier_rates-frontier_{LARGER.get(size, size)}")
    except FirstStageMissing:
        return False


def make_row(
    rule: str,
    size: str,
    ratio: int = TOKENS_PER_PARAMETER,
    seeds: Sequence[int] | None = None,
    faster: float = 1.0,
) -> Row:
    """A rule at a size of the ladder. ratio: tokens per parameter. faster: times the rule's best learning rate."""
    sized = experiment(f"frontier_{size}")
    data, train = sized.data, sized.train
    assert isinstance(data, Packages)
    rate, note = find_rate(rule, size, sized.model.d_model)
    steps = train.steps * ratio // TOKENS_PER_PARAMETER
    changes = {
        "model": sized.model,
        "train": replace_at(
            train, {"lr": rate * faster, "steps": steps, "warmup_steps": steps // 10, "val_every": -(-steps // 4)}
        ),
        "data.context_length": data.context_length,
        "data.validation_windows": data.validation_windows,
        "diagnosed_sequences": sized.diagnosed_sequences,
        "evaluations": measure_at(data.context_length),
    }
    name = f"{rule} {size}" + (f" x{ratio}" if ratio != TOKENS_PER_PARAMETER else "")
    if faster != 1:
        name, note = at_rate(name, rate * faster), f"learning rate {rate * faster:g}, {faster:g} times: {note}"
    return Row(name, changes | RULES[rule], "ours", seeds if seeds is None else tuple(seeds), note)


def make_models(name: str, rows: Sequence[Row]) -> Ablation:
    """Rows of the ladder, with what any question asks of them."""
    return Ablation(
        name=name, base="frontier_100k", baseline=rows[0].name, seeds=SEEDS, columns=MEASURED, rows=tuple(rows)
    )


def ablation() -> Ablation:
    others = [rule for rule in RULES if rule not in ASKED]
    grid = [
        *((rule, size, TOKENS_PER_PARAMETER, SEEDS[:5]) for size in SIZES + EXPLORED for rule in ASKED),
        *((rule, size, TOKENS_PER_PARAMETER, FEW) for size in SIZES + EXPLORED for rule in others),
        *((rule, size, ratio, FEW) for ratio in RATIOS for size in SIZES for rule in ASKED),
        *((rule, size, TOKENS_PER_PARAMETER, FEW[:1]) for size in LARGER for rule in ASKED),
    ]
    first, *later = grid
    return make_models("frontier", [make_row(*first), *(make_row(*one) for one in later if is_rated(*one[:2]))])
