"""Does a bias by distance beside RoPE discriminate positions as claimed? Second attempt, with looks."""

from q_position import FOUND, POSITIONS, RULES, share

from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

OTHERS = {"RoPE alone": "RoPE", "ALiBi": "RoPE + ALiBi"}

question = Question(
    ablation=Ablation(
        name="q_position_2",
        base="distractors",
        baseline="softmax RoPE",
        seeds=tuple(range(100, 180)),
        columns=(
            share("distracted", "queries whose key stands at other distances too", plotted=True),
            share("alone", "queries whose key does not"),
            *COLUMNS,
        ),
        rows=tuple(
            Row(
                f"{name} {at}",
                {
                    "model.attention.normaliser": rule,
                    "model.position": POSITIONS[at][0],
                    "model.attention.bias": POSITIONS[at][1],
                },
                source="ours",
            )
            for name, rule in RULES.items()
            for at in ("RoPE + learned", *OTHERS.values())
        ),
    ),
    claim="Beside RoPE a learned bias by distance finds what counts among distractors, where RoPE alone and RoPE with "
    "ALiBi find less.",
    primary=FOUND,
    contrasts=tuple(
        Contrast(f"{name}: learned bias - {other}", {f"{name} RoPE + learned": 1, f"{name} {at}": -1})
        for name in RULES
        for other, at in OTHERS.items()
    ),
    rule="higher",
    margin=0.05,
    source="the paper's positional discrimination (via review)",
    looks=(10, 20, 40, 80),
    after="q_position",
)
