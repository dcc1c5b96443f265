"""Is Elastic-Softmax less sensitive to RoPE's base than softmax (R9)? 100 and a million. Second attempt, with looks."""

from q_text_2 import FIRST, LOOKS, SEEDS

from lit_lazy.attention import Elastic, Rope, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

BASES = (1e2, 1e6)
RULES = {"softmax": Softmax(), "elastic": Elastic()}


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_rope_base_2",
            base="stdlib_small",
            baseline="softmax base 1e+02",
            seeds=SEEDS,
            columns=COLUMNS,
            rows=tuple(
                at_best_rate(
                    Row(
                        f"{name} base {base:.0e}",
                        {"model.attention.normaliser": rule, "model.position": Rope(base)},
                        source="ours",
                    ),
                    of=name,
                    folder=FIRST,
                )
                for name, rule in RULES.items()
                for base in BASES
            ),
        ),
        claim="As RoPE's base grows from 100 to a million, Elastic-Softmax's loss rises less than softmax's.",
        primary="loss/bits_per_byte",
        contrasts=(
            Contrast(
                "(1e6 - 1e2) elastic - softmax",
                {
                    "elastic base 1e+06": 1,
                    "elastic base 1e+02": -1,
                    "softmax base 1e+06": -1,
                    "softmax base 1e+02": 1,
                },
            ),
        ),
        rule="lower",
        margin=0.02,
        source="R9",
        looks=LOOKS,
        after="q_rope_base",
    )
