"""Which part of Elastic-Softmax removes the sink (R4)? Without the cut, the threshold that follows n, the missing sum.

q_sink compared it with rivals of which one had not learned the task. Affine-scaled weights are neither cut nor do they
sum to 1; RMSNorm of each head's output leaves softmax's weights as they are.
"""

from q_mask_2 import REMOVED, removed

from lit_lazy.attention import AffineScaled, Elastic, HeadNorm, Softmax, Thresholded
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS

NORMALISER, GATE = "model.attention.normaliser", "model.attention.gate"
RULES = {
    "softmax": {NORMALISER: Softmax()},
    "not cut": {NORMALISER: AffineScaled()},
    "threshold by context": {NORMALISER: Elastic(threshold="seq_len")},
    "sum restored": {NORMALISER: Elastic(renormalise=True)},
    "thresholded cosines": {NORMALISER: Thresholded()},
    "softmax + head norm": {NORMALISER: Softmax(), GATE: HeadNorm()},
}

question = Question(
    ablation=Ablation(
        name="q_sink_2",
        baseline="softmax",
        seeds=tuple(range(100, 180)),
        columns=COLUMNS,
        rows=tuple(Row(name, changes, source="ours") for name, changes in RULES.items()),
    ),
    claim="No single part of Elastic-Softmax is needed to remove the sink: less than a quarter of softmax's is left "
    "without the cut, without a threshold that follows n and with weights that sum to 1; thresholded cosines and an "
    "RMSNorm of each head's output leave as little.",
    primary="sink/first_key_weight_non_trigger",
    contrasts=tuple(removed(name, name, "softmax") for name in RULES if name != "softmax"),
    rule="mostly",
    margin=REMOVED,
    source="R4, R6",
    looks=(10, 20, 40, 80),
    after="q_sink",
)
