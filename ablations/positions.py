"""Do positions decide where sinks form? Four normalisers times four kinds of positions."""

from lit_lazy.attention import Alibi, Elastic, LearnedAbsolute, NoBias, NoPosition, Rope, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.table.columns import COLUMNS, HEAD_COLUMNS, INIT_COLUMNS
from lit_lazy.table.designs import main_effects
from lit_lazy.table.records import Column

NORMALISERS = {
    "softmax": Softmax(),
    "tau 0": Elastic(tau_init=0.0),
    "tau 0.5": Elastic(tau_init=0.5),
    "tau 1": Elastic(tau_init=1.0),
}
POSITIONS = {
    "RoPE": (Rope(), NoBias()),
    "learned absolute": (LearnedAbsolute(), NoBias()),
    "ALiBi": (NoPosition(), Alibi(slopes=(0.5,))),
    "no position": (NoPosition(), NoBias()),
}
VALUE_NORM = Column(
    "sink/value_norm",
    "first key's value norm",
    None,
    2,
    note="beside the mean of a sequence's: near 0, its weight adds nothing",
)

ablation = Ablation(
    name="positions",
    baseline="softmax + RoPE",
    seeds=(0, 1, 2),
    columns=(*COLUMNS, *HEAD_COLUMNS, VALUE_NORM, *INIT_COLUMNS),
    primary=("sink/first_key_weight_non_trigger", "sink/first_key_weight"),
    contrasts=main_effects(
        {
            f"{normaliser} + {position}": {"position": position, "normaliser": normaliser}
            for position in POSITIONS
            for normaliser in NORMALISERS
        }
    ),
    rows=tuple(
        Row(
            f"{normaliser} + {position}",
            {
                "model.attention.normaliser": NORMALISERS[normaliser],
                "model.position": POSITIONS[position][0],
                "model.attention.bias": POSITIONS[position][1],
            },
            source="ours",
        )
        for position in POSITIONS
        for normaliser in NORMALISERS
    ),
)
