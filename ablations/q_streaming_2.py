"""Can a cache forget the first tokens once the sink is gone (R14)? Within the trained length, on q_text_2's models.

q_streaming measured at twice the trained length, where RoPE fails whatever the cache holds.
"""

from q_text_2 import FORGOTTEN, GAINS, LOOKS, models

from lit_lazy.grid.question import Question


def question() -> Question:
    return Question(
        ablation=models("q_streaming_2"),
        claim="A cache that forgets all but the newest 32 of 128 tokens costs Elastic-Softmax less than softmax.",
        primary=FORGOTTEN.key,
        contrasts=GAINS,
        rule="lower",
        margin=0.02,
        source="R14",
        looks=LOOKS,
        after="q_streaming",
    )
