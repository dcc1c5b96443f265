"""How should tau begin (R2, R3, R11)? Steps until half of the task is learned. Second attempt, with looks."""

from lit_lazy.attention import Elastic
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.declaration import Comparison, Statement
from lit_lazy.table.records import Column

STEPS = "steps/to_learn"
STARTS = {
    "ramped over 25 %": Elastic(tau_init=0.0, tau_final=1.0, tau_ramp=0.25, learn_tau=False),
    "held at 1": Elastic(tau_init=1.0, learn_tau=False),
    "learned from 0": Elastic(tau_init=0.0),
    "learned from 1": Elastic(tau_init=1.0),
}
PAIRS = {"ramped over 25 %": "held at 1", "learned from 0": "learned from 1"}

question = Question(
    ablation=Ablation(
        name="q_tau_2",
        baseline="learned from 1",
        seeds=tuple(range(100, 180)),
        columns=(
            Column(
                STEPS,
                "steps to learn",
                "lower",
                0,
                note="until the validation loss is halfway from chance to the optimum; measured every 25 steps",
                plotted=True,
            ),
            *COLUMNS,
        ),
        rows=tuple(
            Row(name, {"model.attention.normaliser": STARTS[name]}, source="ours")
            for pair in PAIRS.items()
            for name in pair
        ),
        common={"train.val_every": 25},
    ),
    claim="A tau that rises from 0 to 1, by a ramp or learned, halves the task in fewer steps than a tau of 1 at once.",
    primary=STEPS,
    contrasts=tuple(Statement(f"{low} before {high}", Comparison(low, "<", 1.0, high)) for low, high in PAIRS.items()),
    rule="mostly",
    margin=25.0,
    source="R2, R3, R11",
    looks=(10, 20, 40, 80),
    after="q_tau",
)
