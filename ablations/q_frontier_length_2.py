"""Does Lazy Attention read further than softmax with a bias at a better rate (R13)? 0.3 million parameters, new seeds.

The pilot chose 0.002 for softmax with a bias, on a quarter of the tokens. On all tokens 0.004 lowered its loss by 0.11
nats in the one seed tried (`frontier_rates_full`), so the baseline of q_frontier_length was undertuned at this size.
Here it has 0.004, on seeds on which softmax with a bias was trained at no rate; Lazy Attention's cells of these seeds
are those of q_frontier_loss. Its own rate, 0.008, is the largest that the pilot tried at this size.

Prediction: supported. The former difference was -0.17 nats at four times the length, and 0.11 are gone.
"""

from dataclasses import replace

from frontier import SEEDS, make_models, make_row
from frontier_rates import SEED
from q_frontier_loss import COST

from lit_lazy.grid.question import Question
from lit_lazy.table.records import Contrast

SIZE = "300k"


def question() -> Question:
    baseline, lazy = make_row("softmax + bias", SIZE, faster=2), make_row("lazy", SIZE)
    return Question(
        ablation=replace(make_models("q_frontier_length_2", [baseline, lazy]), seeds=SEEDS[10:]),
        claim="At four times the training's length, with 0.3 million parameters, the loss of Lazy Attention is at most "
        "that of softmax with the same learned bias at twice the learning rate that the pilot chose.",
        primary="length_4x/loss",
        contrasts=(Contrast("lazy - softmax + bias", {lazy.name: 1, baseline.name: -1}),),
        rule="no_worse",
        margin=0.01,
        source="R13",
        pilot_seeds=(SEED, 100),
        looks=(5, 10),
        few_seeds_because=COST,
        after="q_frontier_length",
    )
