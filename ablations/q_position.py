"""Does a bias by distance beside RoPE discriminate positions as claimed? The key also stands where it is wrong."""

from lit_lazy.attention import Alibi, Elastic, LearnedBias, NoBias, NoPosition, Rope, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS, SHARE
from lit_lazy.table.records import Column, Contrast

FOUND = "accuracy/distracted"
POSITIONS = {
    "RoPE": (Rope(), NoBias()),
    "RoPE + learned": (Rope(), LearnedBias()),
    "RoPE + ALiBi": (Rope(), Alibi()),
    "learned alone": (NoPosition(), LearnedBias()),
}
RULES = {"softmax": Softmax(), "elastic": Elastic()}


def share(group: str, note: str, plotted: bool = False) -> Column:
    title = f"accuracy, {group}"
    key = f"accuracy/{group}"
    return Column(key, title, "higher", 2, "%", scale=100, note=note, plotted=plotted, bounds=SHARE)


question = Question(
    ablation=Ablation(
        name="q_position",
        base="distractors",
        baseline="softmax RoPE",
        seeds=(10, 11, 12, 13, 14),
        columns=(
            share("distracted", "queries whose key stands at other distances too", plotted=True),
            share("alone", "queries whose key does not"),
            *COLUMNS,
        ),
        rows=tuple(
            Row(
                f"{name} {at}",
                {"model.attention.normaliser": rule, "model.position": position, "model.attention.bias": bias},
                source="ours",
            )
            for name, rule in RULES.items()
            for at, (position, bias) in POSITIONS.items()
        ),
    ),
    claim="Beside RoPE a learned bias by distance finds what counts among distractors, where RoPE alone and RoPE with "
    "ALiBi find less.",
    primary=FOUND,
    contrasts=tuple(
        Contrast(f"{name}: learned bias - {other}", {f"{name} RoPE + learned": 1, f"{name} {at}": -1})
        for name in RULES
        for other, at in {"RoPE alone": "RoPE", "ALiBi": "RoPE + ALiBi"}.items()
    ),
    rule="higher",
    margin=0.05,
    source="the paper's positional discrimination (via review)",
    fixed_rules=True,
)
