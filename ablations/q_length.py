"""What becomes of Elastic-Softmax at 2 and 4 times the training's length (R10, R13)? Eight positions and SSMax."""

from lit_lazy.attention import (
    Alibi,
    Elastic,
    KerpleLog,
    LearnedBias,
    NoBias,
    NoPosition,
    Rope,
    Softmax,
    SSMax,
    T5Bias,
)
from lit_lazy.config import RunConfig
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.measure.lengths import Lengths
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Column, Contrast

FIRST = "q_text_rates-stdlib_small"
TIMES = (1, 2, 4)


def quarter(base: RunConfig) -> LearnedBias:
    """A table over a quarter of the training's context."""
    return LearnedBias(length=base.data.outline().context_length // 4)


POSITIONS = {
    "RoPE": (Rope(), NoBias()),
    "ALiBi": (NoPosition(), Alibi()),
    "T5": (NoPosition(), T5Bias()),
    "KERPLE": (NoPosition(), KerpleLog()),
    "learned T/4": (NoPosition(), quarter),
    "learned T": (NoPosition(), LearnedBias()),
    "RoPE + learned T": (Rope(), LearnedBias()),
    "none": (NoPosition(), NoBias()),
}
RULES = {
    "softmax": (Softmax(), POSITIONS),
    "elastic": (Elastic(), POSITIONS),
    "SSMax": (SSMax(), ("RoPE", "ALiBi")),
}
RATES_OF = {"SSMax": "softmax"}
"""Rules that the first stage did not have."""
CLAIMED = ("RoPE", "ALiBi", "T5", "learned T", "RoPE + learned T")


def last_quarter(times: int) -> Column:
    title, note = f"loss at {times}x", f"last quarter of the positions, {times} times the training's length"
    key = f"length_{times}x/bits_per_byte_last_quarter"
    return Column(key, title, "lower", 4, "bits/byte", note=note, plotted=times == TIMES[-1], margin=0.02)


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_length",
            base="stdlib_small",
            baseline="softmax RoPE",
            seeds=(15, 16, 17, 18, 19),
            columns=(*map(last_quarter, TIMES), *COLUMNS),
            rows=tuple(
                at_best_rate(
                    Row(
                        f"{name} {at}",
                        {
                            "model.attention.normaliser": rule,
                            "model.position": POSITIONS[at][0],
                            "model.attention.bias": POSITIONS[at][1],
                        },
                        source="ours",
                    ),
                    of=RATES_OF.get(name, name),
                    folder=FIRST,
                )
                for name, (rule, positions) in RULES.items()
                for at in positions
            ),
            common={"evaluations": (Lengths(TIMES),)},
        ),
        claim="At four times the training's length Elastic-Softmax has a lower loss than softmax with the same bias.",
        primary=last_quarter(TIMES[-1]).key,
        contrasts=tuple(Contrast(at, {f"elastic {at}": 1, f"softmax {at}": -1}) for at in CLAIMED),
        rule="lower",
        margin=0.02,
        source="R10, R13",
        fixed_rules=True,
    )
