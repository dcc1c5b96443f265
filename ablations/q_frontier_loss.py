"""Is Lazy Attention as good as softmax where models are trained on enough text (R5)? Two sizes, 20 tokens a parameter.

Prediction: supported at every size, and the gain grows with the size. On the standard library the gain over softmax
grew by 0.07 bits a byte a doubling of the width (q_scale) and shrank by 0.01 a doubling of the steps (q_lasts); a
doubling of the size is half a doubling of the width and one of the steps. A refuted contrast at any size, or a gain
that shrinks by more than the margin a doubling, refutes the claim. Seen before: at 0.1 million parameters and a quarter
of the tokens, in the pilot, lazy was 0.54 nats below softmax, each at its best rate.
"""

import math
from statistics import fmean

from frontier import SIZES, count_parameters, make_models, make_row
from frontier_rates import LOSS, SEED

from lit_lazy.grid.question import Question
from lit_lazy.table.records import Contrast

LOOKS = (5, 10, 20)
COST = "one seed of the three rules at both sizes takes more than an hour of a core"


def difference(of: str, size: str, scale: float = 1.0) -> dict[str, float]:
    return {f"lazy {size}": scale, f"{of} {size}": -scale}


def slope_of_difference() -> dict[str, float]:
    """Weights of the least-squares slope of lazy - softmax in the binary logarithm of the parameters."""
    logs = [math.log2(count_parameters(size)) for size in SIZES]
    apart = [x - fmean(logs) for x in logs]
    scale = math.fsum(x * x for x in apart)
    weights: dict[str, float] = {}
    for size, x in zip(SIZES, apart, strict=True):
        weights |= difference("softmax", size, x / scale)
    return weights


def question() -> Question:
    return Question(
        ablation=make_models(
            "q_frontier_loss", [make_row(rule, size) for size in SIZES for rule in ("softmax", "lazy")]
        ),
        claim="At 20 tokens a parameter, with 0.1 and 0.3 million parameters, Lazy Attention's loss is at most 0.01 "
        "nats above softmax's at every size, and its gain does not shrink by 0.01 nats a doubling of the size.",
        primary=LOSS.key,
        contrasts=(
            *(Contrast(f"lazy - softmax at {size}", difference("softmax", size)) for size in SIZES),
            Contrast("slope of lazy - softmax", slope_of_difference()),
        ),
        rule="no_worse",
        margin=0.01,
        source="R5",
        pilot_seeds=(SEED,),
        looks=LOOKS,
        few_seeds_because=COST,
    )
