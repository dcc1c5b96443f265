"""Does a bias by distance beside RoPE discriminate positions as claimed? Second attempt, with looks."""

from lit_lazy.attention import Alibi, Elastic, LearnedBias, NoBias, Rope, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS, SHARE
from lit_lazy.table.records import Column, Contrast

FOUND = "accuracy/distracted"
BIASES = {"RoPE": NoBias(), "RoPE + learned": LearnedBias(), "RoPE + ALiBi": Alibi()}
RULES = {"softmax": Softmax(), "elastic": Elastic()}
OTHERS = {"RoPE alone": "RoPE", "ALiBi": "RoPE + ALiBi"}


def share(group: str, note: str, plotted: bool = False) -> Column:
    title = f"accuracy, {group}"
    key = f"accuracy/{group}"
    return Column(key, title, "higher", 2, "%", scale=100, note=note, plotted=plotted, bounds=SHARE)


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
                    "model.position": Rope(),
                    "model.attention.bias": BIASES[at],
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
