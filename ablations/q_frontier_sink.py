"""Does a compute-optimal softmax have a sink, and does Lazy Attention remove it (R4)? Two sizes, on their cells.

Prediction: undecided for want of a sink. Softmax had none after 600 steps on the standard library, and 60 million
parameters had one in 4 % of heads after 500 million tokens elsewhere. Where more than a quarter of the seeds have none
the contrast is undecided, and that is the finding: the table says from which size on softmax has one. Seen before: the
pilot had no sink at 0.1 million parameters and a quarter of the tokens, by any rule or rate.
"""

from frontier import SIZES, make_models, make_row
from frontier_rates import SEED

from lit_lazy.grid.question import Question
from lit_lazy.table.declaration import Comparison, Statement

SINK, REMOVED = 0.1, 0.25
"""A sink: more than the first of heads and sequences. It is removed where less than the second of them is left."""
LOOKS = (10, 20)


def removed(size: str) -> Statement:
    lazy, softmax = f"lazy {size}", f"softmax {size}"
    return Statement(size, Comparison(lazy, "<", REMOVED, softmax), given=Comparison(softmax, ">", SINK))


def question() -> Question:
    rows = [make_row(rule, size) for size in SIZES for rule in ("softmax", "lazy")]
    return Question(
        ablation=make_models("q_frontier_sink", rows),
        claim="Where softmax has a sink, in more than a tenth of heads and sequences, Lazy Attention has less than a "
        "quarter of it, with 0.1 and 0.3 million parameters.",
        primary="sink/rate",
        contrasts=tuple(map(removed, SIZES)),
        rule="mostly",
        margin=REMOVED,
        source="R4",
        pilot_seeds=(SEED,),
        looks=LOOKS,
    )
