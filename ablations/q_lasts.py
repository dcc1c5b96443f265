"""Does the gain of Elastic-Softmax last as training goes on (R5)? 600 to 4,800 steps on text, in doublings."""

from q_text_2 import FIRST, LOOKS, SEEDS

from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

STEPS = {600: -0.3, 1_200: -0.1, 2_400: 0.1, 4_800: 0.3}
"""Weight of each length in the least-squares slope over doublings."""
RULES = {"softmax": (Softmax(), -1), "elastic": (Elastic(), 1)}


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_lasts",
            base="stdlib_small",
            baseline="softmax 600",
            seeds=SEEDS,
            columns=COLUMNS,
            rows=tuple(
                at_best_rate(
                    Row(
                        f"{name} {steps}",
                        {
                            "model.attention.normaliser": rule,
                            "train.steps": steps,
                            "train.warmup_steps": steps // 10,
                            "train.val_every": steps // 4,
                        },
                        source="ours",
                    ),
                    of=name,
                    folder=FIRST,
                )
                for name, (rule, _) in RULES.items()
                for steps in STEPS
            ),
        ),
        claim="From 600 to 4,800 steps Elastic-Softmax's gain over softmax on text does not shrink by 0.01 bits per "
        "byte a doubling.",
        primary="loss/bits_per_byte",
        contrasts=(
            Contrast(
                "slope of elastic - softmax",
                {f"{name} {steps}": sign * w for name, (_, sign) in RULES.items() for steps, w in STEPS.items()},
            ),
        ),
        rule="no_worse",
        margin=0.01,
        source="R5",
        looks=LOOKS,
    )
