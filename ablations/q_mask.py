"""Does the sink follow a fixed token (the paper's Figure 2)? BOS at position 1, 2, 5 or 9 of every sequence."""

from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Column, Contrast

ON_BOS = "sink/fixed_key_weight_non_trigger"
POSITIONS = (1, 2, 5, 9)
RULES = {"softmax": Softmax(), "elastic": Elastic()}

question = Question(
    ablation=Ablation(
        name="q_mask",
        baseline="softmax at 1",
        seeds=(10, 11, 12, 13, 14),
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
    claim="Softmax's sink is on BOS wherever BOS stands, and Elastic-Softmax leaves none there.",
    primary=ON_BOS,
    contrasts=tuple(
        Contrast(f"BOS at {place}", {f"elastic at {place}": 1, f"softmax at {place}": -1}) for place in POSITIONS
    ),
    rule="removed",
    margin=0.1,
    source="the paper's Figure 2 (via review)",
    fixed_rules=True,
)
