"""Does the gain of Elastic-Softmax last as models grow (R5)? Widths 32 to 192 on text, in doublings of the width."""

import math
from statistics import fmean

from q_text_2 import FIRST, LOOKS, SEEDS

from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.grid.stages import at_best_rate
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

WIDTHS = (32, 64, 128, 192)
RULES = {"softmax": Softmax(), "elastic": Elastic()}


def slope_of_difference() -> dict[str, float]:
    """Weights of the least-squares slope of elastic - softmax in the binary logarithm of the width."""
    logs = [math.log2(width) for width in WIDTHS]
    apart = [x - fmean(logs) for x in logs]
    scale = math.fsum(x * x for x in apart)
    signs = {"elastic": 1, "softmax": -1}
    return {
        f"{name} {width}": sign * x / scale
        for name, sign in signs.items()
        for width, x in zip(WIDTHS, apart, strict=True)
    }


def question() -> Question:
    return Question(
        ablation=Ablation(
            name="q_scale",
            base="stdlib_small",
            baseline=f"softmax {WIDTHS[0]}",
            seeds=SEEDS,
            columns=COLUMNS,
            rows=tuple(
                at_best_rate(
                    Row(
                        f"{name} {width}",
                        {"model.attention.normaliser": rule, "model.d_model": width, "model.d_ff": 11 * width // 4},
                        source="ours",
                    ),
                    of=name,
                    folder=FIRST,
                )
                for name, rule in RULES.items()
                for width in WIDTHS
            ),
        ),
        claim="From width 32 to 192 Elastic-Softmax's gain over softmax on text does not shrink by 0.02 bits per byte "
        "a doubling.",
        primary="loss/bits_per_byte",
        contrasts=(Contrast("slope of elastic - softmax", slope_of_difference()),),
        rule="no_worse",
        margin=0.02,
        source="R5",
        looks=LOOKS,
    )
