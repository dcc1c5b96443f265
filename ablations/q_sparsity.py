"""Does training leave whole tiles without a weight, which a kernel can skip (R8)? On sequences of 2,048 bytes."""

from lit_lazy.attention import Elastic, LearnedBias, NoBias, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.measure.costs import Costs
from lit_lazy.table.columns import COLUMNS, SHARE
from lit_lazy.table.records import Column, Contrast

FIRST = "q_text_rates-stdlib_small"
RULES = {
    "softmax": (Softmax(), NoBias()),
    "elastic": (Elastic(), NoBias()),
    "lazy": (Elastic(), LearnedBias()),
}


def empty(tile: int, before: bool = False) -> Column:
    when = " at init" if before else ""
    return Column(
        f"{'init/' if before else ''}sparsity/block_{tile}",
        f"empty tiles of {tile}{when}",
        None,
        1,
        "%",
        scale=100,
        note=f"{tile} x {tile} tiles with a visible key and without a weight{when}",
        plotted=tile == 64 and not before,
        bounds=SHARE,
    )


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_sparsity",
            base="stdlib_long",
            baseline="softmax",
            seeds=(15, 16, 17, 18, 19),
            columns=(
                empty(64),
                empty(128),
                empty(64, before=True),
                Column(
                    "cost/attention_rise",
                    "attention over SDPA",
                    "lower",
                    0,
                    "%",
                    scale=100,
                    note="time of attention alone on the model's own queries and keys, forward and backward, more than "
                    "PyTorch's softmax attention takes",
                ),
                Column("cost/step_rise", "step over softmax's", "lower", 0, "%", scale=100, note="forward, backward"),
                *COLUMNS,
            ),
            rows=tuple(
                at_best_rate(
                    Row(name, {"model.attention.normaliser": rule, "model.attention.bias": bias}, source="ours"),
                    of=name,
                    folder=FIRST,
                )
                for name, (rule, bias) in RULES.items()
            ),
            common={"evaluations": (Costs(sequences=1),)},
        ),
        claim="Trained on 2,048 tokens Elastic-Softmax leaves tiles of 64 x 64 keys and queries without a weight.",
        primary=empty(64).key,
        contrasts=(
            Contrast("elastic - softmax", {"elastic": 1, "softmax": -1}),
            Contrast("lazy - softmax", {"lazy": 1, "softmax": -1}),
        ),
        rule="higher",
        margin=0.05,
        source="R8",
        fixed_rules=True,
    )
