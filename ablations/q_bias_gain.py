"""What does a learned bias beside RoPE gain on text (R5)? The other half of q_text, on the models of q_text_2."""

from q_text_2 import LOOKS, WIDE_LOSS, models

from lit_lazy.grid.question import Question
from lit_lazy.table.records import Contrast


def question() -> Question:
    return Question(
        ablation=models("q_bias_gain"),
        claim="On text a learned bias beside RoPE lowers the loss, averaged over softmax and Elastic-Softmax.",
        primary=WIDE_LOSS.key,
        contrasts=(
            Contrast("bias: learned - none", {"softmax + bias": 0.5, "lazy": 0.5, "softmax": -0.5, "elastic": -0.5}),
        ),
        rule="lower",
        margin=0.01,
        source="R5",
        looks=LOOKS,
        after="q_text",
    )
