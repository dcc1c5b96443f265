"""Does the mass of a row tell that nothing is there to look at (R4)? Recall with absent keys, and rivals."""

from lit_lazy.attention import (
    ClippedSoftmax,
    Elastic,
    Entmax15,
    OffByOne,
    Relu,
    Sigmoid,
    SinkLogit,
    Softmax,
    Softpick,
    Sparsemax,
    SSMax,
)
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.measure.evaluation import Varied
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Column, Contrast

DIFFERENCE = "mass/present_minus_absent"
MORE_PAIRS = (32, 64)
"""Four and eight times those of the training."""
RULES = {
    "softmax": Softmax(),
    "elastic": Elastic(),
    "elastic tau_init 0": Elastic(tau_init=0.0),
    "elastic renormalised": Elastic(renormalise=True),
    "off by one": OffByOne(),
    "sink logit": SinkLogit(),
    "softpick": Softpick(),
    "sigmoid": Sigmoid(),
    "ReLU/n": Relu(),
    "clipped": ClippedSoftmax(),
    "entmax 1.5": Entmax15(),
    "sparsemax": Sparsemax(),
    "SSMax": SSMax(),
}
RIVALS = ("off by one", "sink logit", "softpick", "sigmoid", "ReLU/n")
"""Those whose mass may fall too."""


def share(key: str, title: str, note: str = "") -> Column:
    return Column(key, title, "higher", 2, "%", scale=100, note=note)


question = Question(
    ablation=Ablation(
        name="q_null",
        base="recall",
        baseline="softmax",
        seeds=(10, 11, 12, 13, 14),
        columns=(
            Column(
                DIFFERENCE,
                "mass, present - absent",
                "higher",
                3,
                note="what a query keeps more whose key is there",
                plotted=True,
            ),
            Column("mass/present", "mass, present", None, 3),
            Column("mass/absent", "mass, absent", None, 3),
            share("accuracy/present", "accuracy, present"),
            share("accuracy/absent", "accuracy, absent"),
            *(
                share(f"pairs_{pairs}/accuracy/{group}", f"{group} at {pairs} pairs", "trained at 8 pairs")
                for pairs in MORE_PAIRS
                for group in ("present", "absent")
            ),
            *(column for column in COLUMNS if column.key in ("loss/excess", "tau/mean", "model/parameters")),
        ),
        rows=tuple(Row(name, {"model.attention.normaliser": rule}, source="ours") for name, rule in RULES.items()),
        common={"evaluations": (Varied("pairs", MORE_PAIRS),)},
    ),
    claim="The mass of Elastic-Softmax tells absent keys from present ones better than that of its rivals.",
    primary=DIFFERENCE,
    contrasts=tuple(Contrast(f"elastic - {rival}", {"elastic": 1, rival: -1}) for rival in RIVALS),
    rule="higher",
    margin=0.05,
    source="R4",
    fixed_rules=True,
)
