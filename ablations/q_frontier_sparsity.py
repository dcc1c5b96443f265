"""Are compute-optimal models with Lazy Attention sparser than chance (R8)? Two sizes, on their cells.

Prediction: supported. Lazy was 4.5 points over the null on the standard library, elastic without a bias none
(q_sparsity_null). Seen before: in the pilot, after a quarter of the tokens, lazy was 5 points under it.
"""

from frontier import SIZES, make_models, make_row
from frontier_rates import SEED
from q_frontier_sink import LOOKS

from lit_lazy.grid.question import Question
from lit_lazy.table.declaration import Comparison, Statement

LEAST = 0.02
"""Two points."""


def question() -> Question:
    return Question(
        ablation=make_models("q_frontier_sparsity", [make_row("lazy", size) for size in SIZES]),
        claim="With 0.1 and 0.3 million parameters the weights of Lazy Attention are at least two points sparser than "
        "Gaussian scores of the same spread would be.",
        primary="sparsity/over_null",
        contrasts=tuple(Statement(size, Comparison(f"lazy {size}", ">", LEAST)) for size in SIZES),
        rule="mostly",
        margin=LEAST,
        source="R8",
        pilot_seeds=(SEED,),
        looks=LOOKS,
    )
