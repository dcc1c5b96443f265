"""How should tau begin (R2, R3, R11)? Learned from 0, 0.5 or 1, held at 0.5 or 1, ramped to 1; renormalised or not."""

from dataclasses import replace

from lit_lazy.attention import Elastic
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Column, Contrast

QUARTER = "loss/at_25"
STARTS = {
    "learned from 0": Elastic(tau_init=0.0),
    "learned from 0.5": Elastic(tau_init=0.5),
    "learned from 1": Elastic(tau_init=1.0),
    "held at 0.5": Elastic(tau_init=0.5, learn_tau=False),
    "held at 1": Elastic(tau_init=1.0, learn_tau=False),
    "ramped over 25 %": Elastic(tau_init=0.0, tau_final=1.0, tau_ramp=0.25, learn_tau=False),
    "ramped over 50 %": Elastic(tau_init=0.0, tau_final=1.0, tau_ramp=0.5, learn_tau=False),
}
SUFFIX = {False: "", True: " renormalised"}


def loss(percent: int, plotted: bool = False) -> Column:
    title, note = f"loss at {percent} %", f"validation loss after {percent} % of the steps"
    return Column(f"loss/at_{percent}", title, "lower", 4, "nats", note=note, plotted=plotted)


question = Question(
    ablation=Ablation(
        name="q_tau",
        baseline="learned from 1",
        seeds=(10, 11, 12, 13, 14),
        columns=(
            loss(25, plotted=True),
            loss(50),
            loss(75),
            Column("mass/dead_heads", "dead heads", None, 2, note="share of heads without any mass after training"),
            Column("mass/empty_rows", "empty rows", None, 1, "%", scale=100, note="rows without any mass"),
            *COLUMNS,
        ),
        rows=tuple(
            Row(
                f"{name}{SUFFIX[renormalise]}",
                {"model.attention.normaliser": replace(start, renormalise=renormalise)},
                source="ours",
            )
            for renormalise in SUFFIX
            for name, start in STARTS.items()
        ),
        common={"train.val_every": 300},
    ),
    claim="A tau that rises to 1 during training makes for a lower loss at a quarter of it than a tau of 1 at once.",
    primary=QUARTER,
    contrasts=(
        Contrast("ramped over 25 % - held at 1", {"ramped over 25 %": 1, "held at 1": -1}),
        Contrast("ramped over 50 % - held at 1", {"ramped over 50 %": 1, "held at 1": -1}),
        Contrast("learned from 0 - from 1", {"learned from 0": 1, "learned from 1": -1}),
        Contrast("learned from 0.5 - from 1", {"learned from 0.5": 1, "learned from 1": -1}),
    ),
    rule="lower",
    margin=0.005,
    source="R2, R3, R11",
    fixed_rules=True,
)
