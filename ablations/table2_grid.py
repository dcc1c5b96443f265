"""The full factorial behind Table 2: tau_init x threshold x renormalise x bias."""

from collections.abc import Mapping
from typing import Any

from lit_lazy.attention import Alibi, Elastic, LearnedBias, NoBias
from lit_lazy.grid.ablation import Ablation
from lit_lazy.table.columns import COLUMNS, LOSS

NORMALISER = "model.attention.normaliser"
TAU, THRESHOLD = f"{NORMALISER}.tau_init", f"{NORMALISER}.threshold"
CONSTANT_TAUS = (0.0, 0.01, 0.02, 0.05)
TAUS = (0.0, 0.5, 1.0, 2.0)
AXES = {
    TAU: sorted({*TAUS, *CONSTANT_TAUS}),
    THRESHOLD: ("per_query", "seq_len", "per_token", "constant"),
    f"{NORMALISER}.renormalise": (False, True),
    "model.attention.bias": (NoBias(), LearnedBias(), Alibi(slopes=(0.5,))),
}


def other_axis(point: Mapping[str, Any]) -> bool:
    """Whether tau is on the scale of the other thresholds: `constant` subtracts tau itself, not divided by a length."""
    return point[TAU] not in (CONSTANT_TAUS if point[THRESHOLD] == "constant" else TAUS)


ablation = Ablation(
    name="table2_grid",
    baseline="tau_init=1.0 threshold=per_query renormalise=False bias=LearnedBias",
    seeds=(0, 1, 2),
    columns=COLUMNS,
    primary=LOSS,
    common={NORMALISER: Elastic()},
    axes=AXES,
    exclude=other_axis,
)
