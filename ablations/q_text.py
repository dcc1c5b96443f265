"""What do Elastic-Softmax and the bias gain on text, each at its best learning rate (R5)? After q_text_rates."""

from lit_lazy.attention import Elastic, LearnedBias, NoBias, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.designs import main_effects
from lit_lazy.table.records import Contrast

FIRST = "q_text_rates-stdlib_small"
RULES = {
    "softmax": (Softmax(), NoBias()),
    "softmax + bias": (Softmax(), LearnedBias()),
    "elastic": (Elastic(), NoBias()),
    "lazy": (Elastic(), LearnedBias()),
}
DESIGN = {
    "softmax": {"rule": "softmax", "bias": "none"},
    "softmax + bias": {"rule": "softmax", "bias": "learned"},
    "elastic": {"rule": "elastic", "bias": "none"},
    "lazy": {"rule": "elastic", "bias": "learned"},
}


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_text",
            base="stdlib_small",
            baseline="softmax",
            seeds=(15, 16, 17, 18, 19),
            columns=COLUMNS,
            rows=tuple(
                at_best_rate(
                    Row(name, {"model.attention.normaliser": rule, "model.attention.bias": bias}, source="ours"),
                    of=name,
                    folder=FIRST,
                )
                for name, (rule, bias) in RULES.items()
            ),
            common={"train.steps": 3_000, "train.warmup_steps": 200, "train.val_every": 750},
        ),
        claim="On text Elastic-Softmax and a learned bias beside RoPE both lower the loss, each at its best learning "
        "rate.",
        primary="loss/bits_per_byte",
        contrasts=(
            *main_effects(DESIGN),
            Contrast("elastic - softmax without a bias", {"elastic": 1, "softmax": -1}),
            Contrast("elastic - softmax with a bias", {"lazy": 1, "softmax + bias": -1}),
        ),
        rule="lower",
        margin=0.02,
        source="R5",
        fixed_rules=True,
    )
