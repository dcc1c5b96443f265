"""Does Elastic-Softmax do better than a fixed window (R12)? Windows of 16, 32 and 64 keys and none, on text."""

from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

FIRST = "q_text_rates-stdlib_small"
WINDOWS = {"window 16": 16, "window 32": 32, "window 64": 64, "no window": None}
RULES = {"softmax": Softmax(), "elastic": Elastic()}


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_window",
            base="stdlib_small",
            baseline="softmax no window",
            seeds=(15, 16, 17, 18, 19),
            columns=COLUMNS,
            rows=tuple(
                at_best_rate(
                    Row(
                        f"{name} {title}",
                        {"model.attention.normaliser": rule, "model.attention.window": window},
                        source="ours",
                    ),
                    of=name,
                    folder=FIRST,
                )
                for name, rule in RULES.items()
                for title, window in WINDOWS.items()
            ),
        ),
        claim="Elastic-Softmax, which sees all keys, has a lower loss than softmax within a fixed window.",
        primary="loss/bits_per_byte",
        contrasts=tuple(
            Contrast(f"elastic - softmax within {window}", {"elastic no window": 1, f"softmax {title}": -1})
            for title, window in WINDOWS.items()
            if window is not None
        ),
        rule="lower",
        margin=0.02,
        source="R12",
        fixed_rules=True,
    )
