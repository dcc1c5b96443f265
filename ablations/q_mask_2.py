"""Does the sink follow a fixed token (the paper's Figure 2)? BOS at four places. Second attempt, with looks."""

from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.declaration import Comparison, Statement
from lit_lazy.table.records import Column

ON_BOS = "sink/fixed_key_weight_non_trigger"
POSITIONS = (1, 2, 5, 9)
RULES = {"softmax": Softmax(), "elastic": Elastic()}
SINK, REMOVED = 0.1, 0.25
"""A sink weighs more than the first; it is removed where less than the second of it is left."""


def removed(name: str, row: str, of: str) -> Statement:
    """That a row has less than a quarter of the sink that another has."""
    return Statement(name, Comparison(row, "<", REMOVED, of), given=Comparison(of, ">", SINK))


question = Question(
    ablation=Ablation(
        name="q_mask_2",
        baseline="softmax at 1",
        seeds=tuple(range(100, 180)),
        columns=(
            Column(ON_BOS, "weight on BOS", None, 3, note="mean over the non-trigger rows behind it", plotted=True),
            *COLUMNS,
        ),
        rows=tuple(
            Row(
                f"{name} at {position}",
                {"model.attention.normaliser": rule, "data.fixed_token_at": position},
                source="ours",
            )
            for position in POSITIONS
            for name, rule in RULES.items()
        ),
    ),
    claim="Wherever BOS stands softmax has a sink on it, of which Elastic-Softmax leaves less than a quarter.",
    primary=ON_BOS,
    contrasts=tuple(removed(f"BOS at {place}", f"elastic at {place}", f"softmax at {place}") for place in POSITIONS),
    rule="mostly",
    margin=REMOVED,
    source="the paper's Figure 2 (via review)",
    looks=(10, 20, 40, 80),
    after="q_mask",
)
