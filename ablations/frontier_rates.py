"""Which learning rate suits each rule at a size of the ladder? One seed, a quarter of the tokens; first stage.

Run on every size: `--base frontier_300k`. No second stage uses its seed. 100k had all rates, 300k (by `--rows`) those
of 100k's optimum and its half for the rules of the questions: a wider model needs no larger one. If the half is the
best of a rule, 0.002 is searched too.
"""

from collections.abc import Callable

from lit_lazy.attention import Elastic, LearnedBias, OutputGate, Softmax
from lit_lazy.config import RunConfig
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.stages import at_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Column

NORMALISER, BIAS, GATE = "model.attention.normaliser", "model.attention.bias", "model.attention.gate"
RULES = {
    "softmax": {NORMALISER: Softmax()},
    "softmax + bias": {NORMALISER: Softmax(), BIAS: LearnedBias()},
    "elastic": {NORMALISER: Elastic()},
    "lazy": {NORMALISER: Elastic(), BIAS: LearnedBias()},
    "softmax + output gate": {NORMALISER: Softmax(), GATE: OutputGate()},
}
LOSS = Column("loss/val", "validation loss", "lower", 4, "nats", plotted=True, note="a token", margin=0.01)
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
SEED = 90
SHARE = 4
"""One in so many of a size's steps."""


def shorten(field: str, least: int) -> Callable[[RunConfig], int]:
    """A number of steps of the size, divided."""
    return lambda base: max(least, getattr(base.train, field) // SHARE)


SHORT = {
    f"train.{field}": shorten(field, least)
    for field, least in {"steps": 1, "warmup_steps": 0, "val_every": 1, "checkpoint_every": 1}.items()
}

ablation = Ablation(
    name="frontier_rates",
    base="frontier_100k",
    baseline=at_rate("softmax", RATES[0]),
    seeds=(SEED,),
    columns=(LOSS, *COLUMNS),
    primary=(LOSS.key,),
    rows=tuple(
        Row(at_rate(name, rate), {**changes, "train.lr": rate, **SHORT}, source="ours")
        for name, changes in RULES.items()
        for rate in RATES
    ),
)
