"""How far does the bias table have to reach (R10)? 8 or 32 distances against all. Second attempt, with looks."""

from q_text_2 import FIRST, LOOKS, SEEDS, WIDE, WIDE_LOSS

from lit_lazy.attention import Elastic, LearnedBias
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

TABLES = {"W 8": LearnedBias(length=8), "W 32": LearnedBias(length=32), "W T": LearnedBias()}


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_bias_range_2",
            base="stdlib_small",
            baseline="W T",
            seeds=SEEDS,
            columns=(*COLUMNS, WIDE_LOSS),
            rows=tuple(
                at_best_rate(
                    Row(name, {"model.attention.normaliser": Elastic(), "model.attention.bias": table}, source="ours"),
                    of="lazy",
                    folder=FIRST,
                )
                for name, table in TABLES.items()
            ),
            common={"evaluations": (WIDE,)},
        ),
        claim="Lazy Attention with a bias table over 8 or 32 distances is no worse than with one over all 128.",
        primary=WIDE_LOSS.key,
        contrasts=tuple(Contrast(f"{name} - W T", {name: 1, "W T": -1}) for name in TABLES if name != "W T"),
        rule="no_worse",
        margin=0.02,
        source="R10",
        looks=LOOKS,
        after="q_bias_range",
    )
