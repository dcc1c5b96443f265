"""What becomes of a trained model's sink when its attention is changed? SmolLM2-135M, continued on 65,536 tokens.

Exploratory: three seeds, which change the order of the data. After `make smollm2`.
"""

from lit_lazy.attention import Elastic, LearnedBias, OffByOne, OutputGate, SinkLogit, Softmax, Softpick
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.measure.int8 import Int8
from lit_lazy.measure.retrieval import Needle
from lit_lazy.optim import AttentionOutputs
from lit_lazy.table.columns import COLUMNS, HEAD_COLUMNS, SINK_COLUMNS
from lit_lazy.table.records import Column

NORMALISER, BIAS, GATE = "model.attention.normaliser", "model.attention.bias", "model.attention.gate"
LOSS = "loss/val"
TAU_RATE = 100.0
"""The weights' rate of 1e-4 would move tau by less than 0.01 in the whole training."""
RAMPED = Elastic(tau_init=0.0, tau_ramp=0.5, learn_after_ramp=True, tau_lr_scale=TAU_RATE)
"""Tau rises from 0 to 1 over half of the training, then is learned."""


def row(name, normaliser, note="", **changes) -> Row:
    return Row(name, {NORMALISER: normaliser, **changes}, source="ours", note=note)


ROWS = {
    made.name: made
    for made in (
        row("softmax", Softmax(), "the control: the same tokens without a change"),
        row("elastic at once", Elastic(tau_lr_scale=TAU_RATE), "tau 1 from the first step, learned"),
        row("elastic ramped", RAMPED, "tau from 0 to 1 over half of the steps, then learned"),
        row("elastic from 0", Elastic(tau_init=0.0, tau_lr_scale=TAU_RATE), "tau learned from 0"),
        row("lazy", RAMPED, "elastic ramped, and a learned bias from 0", **{BIAS: LearnedBias()}),
        row(
            "elastic distilled",
            RAMPED,
            "elastic ramped, towards the attention outputs before the change",
            **{"train.distillation": AttentionOutputs()},
        ),
        row("off by one", OffByOne()),
        row("sink logit", SinkLogit()),
        row("softpick", Softpick()),
        row("gate", Softmax(), "an output gate that starts open", **{GATE: OutputGate(starts_open=True)}),
        row("softmax with BOS", Softmax(), "every window begins with token 0", **{"data.bos": True}),
        row("elastic ramped with BOS", RAMPED, "every window begins with token 0", **{"data.bos": True}),
    )
}
OTHER_LOSSES = ("loss/excess", "loss/bits_per_byte")
EVALUATED = (
    Column("needle/accuracy", "needle", "higher", 1, "%", scale=100, note="found in 512 tokens, at five depths"),
    Column("needle/loss", "loss of the needle", "lower", 3, "nats"),
    Column("int8/loss_rise", "loss under int8", "lower", 3, "nats", note="rise with int8 weights and activations"),
)
MEASURED = (
    Column(LOSS, "validation loss", "lower", 3, "nats", plotted=True, note="a token", margin=0.05),
    *(column for column in (*COLUMNS, *HEAD_COLUMNS, *SINK_COLUMNS) if column.key not in OTHER_LOSSES),
    *EVALUATED,
)
COMMON = {"evaluations": (Needle(lengths=(512,), sequences=4), Int8(sequences=8))}

ablation = Ablation(
    name="adapt",
    base="smollm2",
    baseline="softmax",
    seeds=(0, 1, 2),
    columns=MEASURED,
    rows=tuple(ROWS.values()),
    common=COMMON,
    primary=(LOSS,),
)
