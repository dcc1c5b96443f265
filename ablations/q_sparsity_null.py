"""Is the sparsity of a trained model more than chance (R8)? On the models of q_text_2, over a Gaussian null per row."""

from q_text_2 import LOOKS, models

from lit_lazy.grid.question import Question
from lit_lazy.table.declaration import Comparison, Statement

LEAST = 0.02
"""Two points."""


def question() -> Question:
    return Question(
        ablation=models("q_sparsity_null"),
        claim="Training on text makes the weights at least two points sparser than Gaussian scores of the same spread "
        "would be, with and without a learned bias.",
        primary="sparsity/over_null",
        contrasts=tuple(Statement(row, Comparison(row, ">", LEAST)) for row in ("elastic", "lazy")),
        rule="mostly",
        margin=LEAST,
        source="R8",
        looks=LOOKS,
    )
