"""The rivals on Bigram-Backcopy, each at its best learning rate. After rivals_rates on backcopy."""

from rivals_rates import tune

from lit_lazy.grid.ablation import Ablation


def ablation() -> Ablation:
    return tune("rivals_backcopy", base="backcopy", seeds=tuple(range(30, 40)))
