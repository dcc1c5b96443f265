"""How far does the bias table have to reach (R10)? 8, 32, half or all of the context's distances, on text.

A table is 4 W bytes a head and layer, 16 W with its gradient and Adam's moments. Over 32,768 distances, at the paper's
24 layers of 16 heads, that is 50 MB and 201 MB; over 512 distances 0.8 MB and 3.1 MB.
"""

from lit_lazy.attention import Elastic, LearnedBias, Softmax
from lit_lazy.config import RunConfig
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

FIRST = "q_text_rates-stdlib_small"


def half(base: RunConfig) -> LearnedBias:
    """A table over half of the context."""
    return LearnedBias(length=base.data.outline().context_length // 2)


TABLES = {"8": LearnedBias(length=8), "32": LearnedBias(length=32), "T/2": half, "T": LearnedBias()}
RULES = {"softmax": (Softmax(), "softmax + bias"), "lazy": (Elastic(), "lazy")}


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_bias_range",
            base="stdlib_small",
            baseline="lazy W T",
            seeds=(15, 16, 17, 18, 19),
            columns=COLUMNS,
            rows=tuple(
                at_best_rate(
                    Row(
                        f"{name} W {length}",
                        {"model.attention.normaliser": rule, "model.attention.bias": table},
                        source="ours",
                    ),
                    of=of,
                    folder=FIRST,
                )
                for name, (rule, of) in RULES.items()
                for length, table in TABLES.items()
            ),
        ),
        claim="A bias table over 8 distances, 32, or half of the context is as good as one over all of it.",
        primary="loss/bits_per_byte",
        contrasts=tuple(
            Contrast(f"W {length} - W T", {f"lazy W {length}": 1, "lazy W T": -1}) for length in TABLES if length != "T"
        ),
        rule="same",
        margin=0.02,
        source="R10",
        fixed_rules=True,
    )
