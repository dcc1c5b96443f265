"""Does a trained model that is given Elastic-Softmax keep its loss? SmolLM2-135M after 65,536 tokens."""

from dataclasses import replace

from adapt import EVALUATED, LOSS, MEASURED, ROWS
from adapt import ablation as explored

from lit_lazy.grid.ablation import Ablation
from lit_lazy.grid.question import Question
from lit_lazy.table.records import Contrast

ASKED = ("elastic ramped", "lazy", "gate")


def continued(name: str) -> Ablation:
    """The rows of the questions without evaluations, with seeds that the exploratory table did not use."""
    rows = tuple(ROWS[row] for row in ("softmax", *ASKED))
    columns = tuple(column for column in MEASURED if column not in EVALUATED)
    seeds = tuple(range(100, 140))
    return replace(explored, name=name, rows=rows, seeds=seeds, columns=columns, common={}, primary=())


question = Question(
    ablation=continued("q_adapt_loss"),
    claim="After as many tokens a trained model that is given Elastic-Softmax, with or without a bias, or a gate, has "
    "a loss at most 0.05 nats a token above softmax's.",
    primary=LOSS,
    contrasts=tuple(Contrast(f"{name} - softmax", {name: 1, "softmax": -1}) for name in ASKED),
    rule="no_worse",
    margin=0.05,
    source="adapting a trained model",
    looks=(10, 20, 40),
)
