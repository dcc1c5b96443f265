"""Does the base of RoPE matter to Elastic-Softmax (R9)? From 100 to a million on text; the paper's is not known."""

from lit_lazy.attention import Elastic, Rope, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

FIRST = "q_text_rates-stdlib_small"
BASES = (1e2, 1e3, 1e4, 1e5, 1e6)
USUAL = 1e4
RULES = {"softmax": Softmax(), "elastic": Elastic()}


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_rope_base",
            base="stdlib_small",
            baseline=f"elastic base {USUAL:.0e}",
            seeds=(15, 16, 17, 18, 19),
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
        claim="The loss of Elastic-Softmax is the same for any base of RoPE from 100 to a million.",
        primary="loss/bits_per_byte",
        contrasts=tuple(
            Contrast(f"{base:.0e} - {USUAL:.0e}", {f"elastic base {base:.0e}": 1, f"elastic base {USUAL:.0e}": -1})
            for base in BASES
            if base != USUAL
        ),
        rule="same",
        margin=0.02,
        source="R9",
        fixed_rules=True,
    )
