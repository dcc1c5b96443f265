"""Does a compute-optimal model with Lazy Attention read beyond its training's length (R13)? Two sizes, on their cells.

Prediction: refuted. On the standard library Elastic-Softmax with RoPE and a learned bias was no better than softmax
with it at four times the length (q_length). Both have the same bias here, so that the rule alone differs.
"""

from frontier import SIZES, make_models, make_row
from frontier_rates import SEED
from q_frontier_loss import COST, LOOKS, difference

from lit_lazy.grid.question import Question
from lit_lazy.table.records import Contrast


def question() -> Question:
    rows = [make_row(rule, size) for size in SIZES for rule in ("softmax + bias", "lazy")]
    return Question(
        ablation=make_models("q_frontier_length", rows),
        claim="At four times the training's length, with 0.1 and 0.3 million parameters, the loss of Lazy Attention is "
        "at most that of softmax with the same learned bias.",
        primary="length_4x/loss",
        contrasts=tuple(
            Contrast(f"lazy - softmax + bias at {size}", difference("softmax + bias", size)) for size in SIZES
        ),
        rule="no_worse",
        margin=0.01,
        source="R13",
        pilot_seeds=(SEED,),
        looks=LOOKS,
        few_seeds_because=COST,
    )
