"""What do Elastic-Softmax and the bias cost beside softmax (R7, R15)? Time, memory and bytes of the cache, measured.

At 2,048 tokens after 20 steps: what a trained model saves by empty tiles is q_sparsity's. Rises are over the same model
with softmax attention and no bias, which takes turns with it in one process, so softmax's own say what the noise is.
"""

from lit_lazy.attention import Elastic, LearnedBias, NoBias, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.measure.costs import Costs
from lit_lazy.table.records import Column, Contrast

RULES = {
    "softmax": (Softmax(), NoBias()),
    "softmax + bias": (Softmax(), LearnedBias()),
    "elastic": (Elastic(), NoBias()),
    "lazy": (Elastic(), LearnedBias()),
}


def rise(name: str, title: str, note: str, plotted: bool = False) -> Column:
    return Column(f"cost/{name}_rise", title, "lower", 0, "%", scale=100, note=note, plotted=plotted, margin=0.1)


question = Question(
    ablation=Ablation(
        name="q_cost",
        base="stdlib_long",
        baseline="softmax",
        seeds=(10, 11, 12, 13, 14),
        columns=(
            rise("step", "training step", "time of a forward and backward pass over softmax's", plotted=True),
            rise("attention", "attention alone", "time, forward and backward, over PyTorch's own"),
            rise("decode", "decoding", "time of a token behind 2,032 others over softmax's"),
            rise("kept", "memory of training", "bytes kept for the backward pass over softmax's"),
            Column("cost/kept_bytes", "kept", None, ",.0f", "bytes/token", note="for the backward pass"),
            Column("cost/cache_bytes", "cache", None, ",.0f", "bytes/token", note="keys and values of all layers"),
            Column("model/parameters", "parameters", None, ",.0f"),
        ),
        rows=tuple(
            Row(name, {"model.attention.normaliser": rule, "model.attention.bias": bias}, source="ours")
            for name, (rule, bias) in RULES.items()
        ),
        common={
            "train.steps": 20,
            "train.warmup_steps": 5,
            "train.val_every": 20,
            "evaluations": (Costs(sequences=1),),
        },
    ),
    claim="A training step with Elastic-Softmax takes as long as one with softmax, within a tenth.",
    primary="cost/step_rise",
    contrasts=(
        Contrast("elastic - softmax", {"elastic": 1, "softmax": -1}),
        Contrast("lazy - softmax", {"lazy": 1, "softmax": -1}),
    ),
    rule="same",
    margin=0.1,
    source="R7, R15",
    fixed_rules=True,
)
