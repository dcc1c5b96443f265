"""The rivals on text, each at its best learning rate. After rivals_rates on stdlib_small."""

from rivals_rates import tune

from lit_lazy.grid.ablation import Ablation


def ablation() -> Ablation:
    return tune("rivals_text", base="stdlib_small", seeds=tuple(range(30, 35)))
