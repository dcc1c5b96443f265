"""Does training leave whole tiles without a weight, which a kernel can skip (R8)? Second attempt, with looks."""

from q_text_2 import FIRST

from lit_lazy.attention import Elastic, LearnedBias, NoBias
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS, SHARE
from lit_lazy.table.declaration import Comparison, Statement
from lit_lazy.table.records import Column

LEAST = 0.05
BIASES = {"elastic": NoBias(), "lazy": LearnedBias()}


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
            name="q_sparsity_2",
            base="stdlib_long",
            baseline="elastic",
            seeds=tuple(range(100, 180)),
            columns=(empty(64), empty(128), empty(64, before=True), *COLUMNS),
            rows=tuple(
                at_best_rate(
                    Row(name, {"model.attention.normaliser": Elastic(), "model.attention.bias": bias}, source="ours"),
                    of=name,
                    folder=FIRST,
                )
                for name, bias in BIASES.items()
            ),
        ),
        claim="Trained on 2,048 tokens Elastic-Softmax leaves at least 5 % of its tiles of 64 x 64 keys and queries "
        "without a weight, with and without a learned bias.",
        primary=empty(64).key,
        contrasts=tuple(Statement(name, Comparison(name, ">", LEAST)) for name in BIASES),
        rule="mostly",
        margin=LEAST,
        source="R8",
        looks=(10, 20, 40, 80),
        after="q_sparsity",
    )
