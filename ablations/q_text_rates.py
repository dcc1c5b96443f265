"""Which learning rate suits each rule on text, and is elastic ahead of softmax at each (R5)? First stage of q_text."""

from lit_lazy.attention import Elastic, LearnedBias, NoBias, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

RATES = (2e-3, 5e-3, 1e-2)
RULES = {
    "softmax": (Softmax(), NoBias()),
    "softmax + bias": (Softmax(), LearnedBias()),
    "elastic": (Elastic(), NoBias()),
    "lazy": (Elastic(), LearnedBias()),
}

question = Question(
    ablation=Ablation(
        name="q_text_rates",
        base="stdlib_small",
        baseline=at_rate("softmax", RATES[0]),
        seeds=(10, 11, 12, 13, 14),
        columns=COLUMNS,
        rows=tuple(
            Row(
                at_rate(name, rate),
                {"model.attention.normaliser": rule, "model.attention.bias": bias, "train.lr": rate},
                source="ours",
            )
            for name, (rule, bias) in RULES.items()
            for rate in RATES
        ),
    ),
    claim="After 600 steps on text Elastic-Softmax has a lower loss than softmax, whatever the learning rate.",
    primary="loss/bits_per_byte",
    contrasts=tuple(
        Contrast(f"elastic - softmax at {rate:g}", {at_rate("elastic", rate): 1, at_rate("softmax", rate): -1})
        for rate in RATES
    ),
    rule="lower",
    margin=0.02,
    source="R5",
    fixed_rules=True,
)
