"""Does Elastic-Softmax do better than a short window (R12)? Windows of 16 and 32 keys. Second attempt, with looks."""

from q_text_2 import FIRST, LOOKS, SEEDS

from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

WINDOW = "model.attention.window"
ROWS = {
    "elastic": ("elastic", Elastic(), None),
    "softmax within 16": ("softmax", Softmax(), 16),
    "softmax within 32": ("softmax", Softmax(), 32),
}


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_window_2",
            base="stdlib_small",
            baseline="elastic",
            seeds=SEEDS,
            columns=COLUMNS,
            rows=tuple(
                at_best_rate(
                    Row(name, {"model.attention.normaliser": rule, WINDOW: window}, source="ours"),
                    of=of,
                    folder=FIRST,
                )
                for name, (of, rule, window) in ROWS.items()
            ),
        ),
        claim="Elastic-Softmax, which sees all keys, has a lower loss than softmax within 16 or 32 keys.",
        primary="loss/bits_per_byte",
        contrasts=tuple(Contrast(f"elastic - {name}", {"elastic": 1, name: -1}) for name in ROWS if name != "elastic"),
        rule="lower",
        margin=0.02,
        source="R12",
        looks=LOOKS,
        after="q_window",
    )
