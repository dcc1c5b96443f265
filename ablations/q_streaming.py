"""Can a cache forget the first tokens once the sink is gone (R14)? On the models of q_text, theta by cache and by text.

They are trained again: same settings and seeds, hence the same weights.
"""

from lit_lazy.attention import Elastic, LearnedBias, NoBias, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.measure.lengths import Streaming
from lit_lazy.table.columns import COLUMNS, HEAD_COLUMNS
from lit_lazy.table.records import Column, Contrast

FIRST = "q_text_rates-stdlib_small"
KEPT, WINDOW = (0, 1, 4), 64
RULES = {
    "softmax": (Softmax(), NoBias()),
    "softmax + bias": (Softmax(), LearnedBias()),
    "elastic": (Elastic(), NoBias()),
    "lazy": (Elastic(), LearnedBias()),
}


def excess(first: int, n_held: bool = False) -> Column:
    held, theta = ("_n_held", ", theta by text") if n_held else ("", "")
    return Column(
        f"streaming/{first}_and_{WINDOW}{held}/bits_per_byte_excess",
        f"loss {first}+{WINDOW} - whole{theta}",
        "lower",
        4,
        "bits/byte",
        note=f"with the first {first} and the newest {WINDOW} tokens in the cache, over all of them",
        plotted=first == 0 and not n_held,
        margin=0.02,
    )


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_streaming",
            base="stdlib_small",
            baseline="softmax",
            seeds=(15, 16, 17, 18, 19),
            columns=(
                *(excess(first, n_held) for n_held in (False, True) for first in KEPT),
                Column("streaming/whole/bits_per_byte", "loss, whole cache", "lower", 4, "bits/byte"),
                *COLUMNS,
                *HEAD_COLUMNS,
            ),
            rows=tuple(
                at_best_rate(
                    Row(name, {"model.attention.normaliser": rule, "model.attention.bias": bias}, source="ours"),
                    of=name,
                    folder=FIRST,
                )
                for name, (rule, bias) in RULES.items()
            ),
            common={
                "train.steps": 3_000,
                "train.warmup_steps": 200,
                "train.val_every": 750,
                "evaluations": (Streaming(KEPT, WINDOW, sequences=64, n_held=True),),
            },
        ),
        claim="A cache that forgets the first tokens costs Elastic-Softmax less than softmax.",
        primary=excess(0).key,
        contrasts=(
            Contrast("elastic - softmax", {"elastic": 1, "softmax": -1}),
            Contrast("lazy - softmax + bias", {"lazy": 1, "softmax + bias": -1}),
        ),
        rule="lower",
        margin=0.02,
        source="R14",
        fixed_rules=True,
    )
