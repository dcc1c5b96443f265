"""Is Elastic-Softmax as good as softmax that keeps as many keys (R8)? On text, at the sparsity that it came to have."""

from q_text_2 import FIRST, LOOKS, SEEDS, WIDE, WIDE_LOSS

from lit_lazy.attention import Elastic, Softmax, TopK
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

KEPT = 0.2
"""Share of visible keys with a weight of Elastic-Softmax at its best rate (docs/results/q_text_rates-stdlib_small)."""
RULES = {"softmax": (Softmax(), "softmax"), "elastic": (Elastic(), "elastic"), "top k": (TopK(KEPT), "softmax")}


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_matched",
            base="stdlib_small",
            baseline="softmax",
            seeds=SEEDS,
            columns=(*COLUMNS, WIDE_LOSS),
            rows=tuple(
                at_best_rate(Row(name, {"model.attention.normaliser": rule}, source="ours"), of=of, folder=FIRST)
                for name, (rule, of) in RULES.items()
            ),
            common={"evaluations": (WIDE,)},
        ),
        claim="On text Elastic-Softmax is no worse than a softmax over as many keys of each row, those of the largest "
        "scores.",
        primary=WIDE_LOSS.key,
        contrasts=(Contrast("elastic - top k", {"elastic": 1, "top k": -1}),),
        rule="no_worse",
        margin=0.02,
        source="R8",
        looks=LOOKS,
    )
