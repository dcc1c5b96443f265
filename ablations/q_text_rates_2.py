"""Is Elastic-Softmax ahead after 600 steps on text, each rule at its best rate (R5)? Second attempt, with looks."""

from q_text_2 import GAINS, LOOKS, SEEDS, rows_at_best_rates

from lit_lazy.grid.ablation import Ablation
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_text_rates_2",
            base="stdlib_small",
            baseline="softmax",
            seeds=SEEDS,
            columns=COLUMNS,
            rows=rows_at_best_rates(),
        ),
        claim="After 600 steps on text Elastic-Softmax has a lower loss than softmax, each at its best learning rate.",
        primary="loss/bits_per_byte",
        contrasts=GAINS,
        rule="lower",
        margin=0.02,
        source="R5",
        looks=LOOKS,
        after="q_text_rates",
    )
