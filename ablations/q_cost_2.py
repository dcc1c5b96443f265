"""What does a training step cost with Elastic-Softmax beside softmax (R7, R15)? At three lengths, against SDPA.

The compiled backend came after q_cost. Rises are over a model with PyTorch's own softmax attention, which takes turns
with each row in one process; the row of softmax runs on that too, so its rise is what the noise is.
"""

from lit_lazy.attention import Elastic, LearnedBias, NoBias, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.measure.costs import Costs
from lit_lazy.table.records import Column, Contrast

DIVISORS = {16: 128, 4: 512, 1: 2_048}
"""Of the context, with the lengths that they give."""
NORMALISER, BIAS = "model.attention.normaliser", "model.attention.bias"


def rise(name: str, title: str, note: str = "", plotted: bool = False) -> Column:
    return Column(f"cost/{name}", title, "lower", 0, "%", scale=100, note=note, plotted=plotted, margin=0.1)


question = Question(
    ablation=Ablation(
        name="q_cost_2",
        base="stdlib_long",
        baseline="softmax",
        seeds=tuple(range(100, 180)),
        columns=(
            rise("step_rise_worst", "training step, worst", "the largest rise of the three lengths", plotted=True),
            *(rise(f"step_rise_over_{n}", f"step at {length:,} tokens") for n, length in DIVISORS.items()),
            rise("attention_rise", "attention alone", "at 2,048 tokens, forward and backward, over PyTorch's own"),
            rise("decode_rise", "decoding", "time of a token behind 2,032 others over softmax's"),
            rise("kept_rise", "memory of training", "bytes kept for the backward pass over softmax's"),
        ),
        rows=(
            Row("softmax", {NORMALISER: Softmax(), BIAS: NoBias(), "model.backend": "sdpa"}, source="ours"),
            Row("elastic", {NORMALISER: Elastic(), BIAS: NoBias()}, source="ours"),
            Row("lazy", {NORMALISER: Elastic(), BIAS: LearnedBias()}, source="ours"),
        ),
        common={
            "train.steps": 20,
            "train.warmup_steps": 5,
            "train.val_every": 20,
            "evaluations": (Costs(sequences=1, divisors=tuple(DIVISORS)),),
        },
    ),
    claim="At 128, 512 and 2,048 tokens a training step with Elastic-Softmax, with and without a learned bias, is at "
    "most a tenth dearer than one with softmax.",
    primary="cost/step_rise_worst",
    contrasts=(
        Contrast("elastic - softmax", {"elastic": 1, "softmax": -1}),
        Contrast("lazy - softmax", {"lazy": 1, "softmax": -1}),
    ),
    rule="no_worse",
    margin=0.1,
    source="R7, R15",
    looks=(10, 20, 40, 80),
    after="q_cost",
)
