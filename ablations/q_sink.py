"""Where does Elastic-Softmax remove the sink, and does it alone (R4, R6)? Positions, embeddings' scale, and rivals."""

from lit_lazy.attention import (
    Alibi,
    ClippedSoftmax,
    Elastic,
    LearnedAbsolute,
    NoBias,
    NoPosition,
    OffByOne,
    OutputGate,
    Relu,
    Rope,
    Sigmoid,
    SinkLogit,
    Softmax,
    Softpick,
)
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS, INIT_COLUMNS
from lit_lazy.table.records import Contrast

NORMALISER, GATE = "model.attention.normaliser", "model.attention.gate"
STDS = (0.02, 1.0)
"""Standard deviations of the initial token embeddings."""
POSITIONS = {
    "RoPE": (Rope(), NoBias()),
    "learned absolute": (LearnedAbsolute(), NoBias()),
    "ALiBi": (NoPosition(), Alibi(slopes=(0.5,))),
}
RULES = {
    "softmax": {NORMALISER: Softmax()},
    "elastic": {NORMALISER: Elastic()},
    "off by one": {NORMALISER: OffByOne()},
    "sink logit": {NORMALISER: SinkLogit()},
    "softpick": {NORMALISER: Softpick()},
    "sigmoid": {NORMALISER: Sigmoid()},
    "clipped": {NORMALISER: ClippedSoftmax()},
    "gated": {NORMALISER: Softmax(), GATE: OutputGate()},
    "ReLU/n": {NORMALISER: Relu()},
}
RIVALS = [rule for rule in RULES if rule not in ("softmax", "elastic")]
CLAIMED = tuple(f"{position} std {std:g}" for position in ("RoPE", "learned absolute") for std in STDS)
"""Not with ALiBi, where softmax itself has no sink (docs/results/positions-backcopy)."""


def gone(name: str, where: str, others: list[str]) -> Contrast:
    """Elastic-Softmax against other rules under one condition."""
    return Contrast(name, {f"elastic {where}": 1} | {f"{other} {where}": -1 / len(others) for other in others})


question = Question(
    ablation=Ablation(
        name="q_sink",
        baseline=f"softmax {CLAIMED[0]}",
        seeds=(10, 11, 12, 13, 14),
        columns=(*COLUMNS, *INIT_COLUMNS),
        rows=tuple(
            Row(
                f"{rule} {position} std {std:g}",
                changes | {"model.position": at, "model.attention.bias": bias, "model.embedding_init_std": std},
                source="ours",
                note="the weights are those before the gate" if GATE in changes else "",
            )
            for position, (at, bias) in POSITIONS.items()
            for std in STDS
            for rule, changes in RULES.items()
        ),
    ),
    claim="Elastic-Softmax removes the sink that softmax has, whatever the positions and the embeddings' scale, and "
    "with RoPE it alone does so.",
    primary="sink/first_key_weight_non_trigger",
    contrasts=(
        *(gone(where, where, ["softmax"]) for where in CLAIMED),
        gone("alone among its rivals, RoPE std 0.02", CLAIMED[0], RIVALS),
    ),
    rule="alone",
    margin=0.1,
    source="R4, R6",
    fixed_rules=True,
)
