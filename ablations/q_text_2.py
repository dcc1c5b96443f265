"""What does Elastic-Softmax gain on text over softmax at its best learning rate (R5)? Second attempt, with looks.

Its models also answer q_bias_gain, q_streaming_2 and q_sparsity_null, which share its rows.
"""

from lit_lazy.attention import Elastic, LearnedBias, NoBias, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.measure.evaluation import Varied
from lit_lazy.measure.lengths import Streaming
from lit_lazy.table.columns import COLUMNS, HEAD_COLUMNS
from lit_lazy.table.records import Column, Contrast

FIRST = "q_text_rates-stdlib_small"
LOOKS = (10, 20, 40, 80)
SEEDS = tuple(range(100, 180))
RULES = {
    "softmax": (Softmax(), NoBias()),
    "softmax + bias": (Softmax(), LearnedBias()),
    "elastic": (Elastic(), NoBias()),
    "lazy": (Elastic(), LearnedBias()),
}
WINDOWS = 2_560
"""Ten times the windows of the validations: most of a contrast within one rule is what they happen to hold."""
WIDE = Varied("validation_windows", (WINDOWS,))
WIDE_LOSS = Column(
    f"validation_windows_{WINDOWS}/loss/bits_per_byte",
    "loss, wide",
    "lower",
    4,
    "bits/byte",
    note=f"validation loss on {WINDOWS:,} windows",
    margin=0.02,
)
NEWEST = 32
"""Tokens in the cache that forgets, a quarter of the context that was trained."""
FORGOTTEN = Column(
    f"streaming/0_and_{NEWEST}/bits_per_byte_excess",
    f"loss 0+{NEWEST} - whole",
    "lower",
    4,
    "bits/byte",
    note=f"with only the newest {NEWEST} tokens in the cache, over all, within the trained length",
    margin=0.02,
)
GAINS = (
    Contrast("elastic - softmax without a bias", {"elastic": 1, "softmax": -1}),
    Contrast("elastic - softmax with a bias", {"lazy": 1, "softmax + bias": -1}),
)


def rows_at_best_rates() -> tuple[Row, ...]:
    """The four rules, each at its best rate of the first stage."""
    return tuple(
        at_best_rate(
            Row(row, {"model.attention.normaliser": rule, "model.attention.bias": bias}, source="ours"),
            of=row,
            folder=FIRST,
        )
        for row, (rule, bias) in RULES.items()
    )


def models(name: str) -> Ablation:
    """The four rules, trained for 3,000 steps at their best rates, with what any question asks of them."""
    return Ablation(
        name=name,
        base="stdlib_small",
        baseline="softmax",
        seeds=SEEDS,
        columns=(*COLUMNS, WIDE_LOSS, FORGOTTEN, *HEAD_COLUMNS),
        rows=rows_at_best_rates(),
        common={
            "train.steps": 3_000,
            "train.warmup_steps": 200,
            "train.val_every": 750,
            "evaluations": (WIDE, Streaming((0,), NEWEST, times=1, sequences=64)),
        },
    )


def question() -> Question:
    return Question(
        ablation=models("q_text_2"),
        claim="On text Elastic-Softmax has a lower loss than softmax, with and without a learned bias beside RoPE, "
        "each at its best learning rate.",
        primary="loss/bits_per_byte",
        contrasts=GAINS,
        rule="lower",
        margin=0.02,
        source="R5",
        looks=LOOKS,
        after="q_text",
    )
