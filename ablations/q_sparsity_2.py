"""Does training leave whole tiles without a weight, which a kernel can skip (R8)? Second attempt, with looks."""

from q_sparsity import FIRST, RULES, empty

from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.declaration import Comparison, Statement

LEAST = 0.05
CLAIMED = ("elastic", "lazy")


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_sparsity_2",
            base="stdlib_long",
            baseline="elastic",
            seeds=tuple(range(100, 180)),
            columns=(empty(64), empty(128), empty(64, before=True), *COLUMNS),
            rows=tuple(
                at_best_rate(
                    Row(
                        name,
                        {"model.attention.normaliser": RULES[name][0], "model.attention.bias": RULES[name][1]},
                        source="ours",
                    ),
                    of=name,
                    folder=FIRST,
                )
                for name in CLAIMED
            ),
        ),
        claim="Trained on 2,048 tokens Elastic-Softmax leaves at least 5 % of its tiles of 64 x 64 keys and queries "
        "without a weight, with and without a learned bias.",
        primary=empty(64).key,
        contrasts=tuple(Statement(name, Comparison(name, ">", LEAST)) for name in CLAIMED),
        rule="mostly",
        margin=LEAST,
        source="R8",
        looks=(10, 20, 40, 80),
        after="q_sparsity",
    )
