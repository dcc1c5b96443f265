"""Lazy Attention compared with its rivals: eleven other rules for the weights and two gates, each replacing softmax."""

from lit_lazy.attention import (
    ClippedSoftmax,
    Differential,
    Elastic,
    Entmax15,
    LearnedBias,
    OffByOne,
    OutputGate,
    Relu,
    Sigmoid,
    SinkLogit,
    Softmax,
    Softpick,
    Sparsemax,
    SSMax,
    ValueGate,
)  # fmt: skip
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.table.columns import COLUMNS, LOSS

NORMALISER, BIAS, GATE = "model.attention.normaliser", "model.attention.bias", "model.attention.gate"
PAPER, OURS = "paper (via review)", "ours"


def row(name, normaliser, note="", source=OURS, **changes) -> Row:
    return Row(name, {NORMALISER: normaliser, **changes}, source, note=note)


ablation = Ablation(
    name="rivals",
    baseline="softmax",
    seeds=(0, 1, 2, 3, 4),
    columns=COLUMNS,
    primary=LOSS,
    rows=(
        row("softmax", Softmax(), source=PAPER),
        row("elastic", Elastic(), "tau_init 1, per_query, no bias", PAPER),
        row("lazy", Elastic(), "elastic and a learned bias", PAPER, **{BIAS: LearnedBias()}),
        row("off by one", OffByOne(), "1 added to softmax's sum"),
        row("sink logit", SinkLogit(), "learned per head, from 0"),
        row("clipped over keys", ClippedSoftmax(), "alpha 3 over the keys a query sees"),
        row("clipped over context", ClippedSoftmax(length="context"), "alpha 3 over the context, as published"),
        row("softpick", Softpick()),
        row("sigmoid", Sigmoid(), "bias -ln n"),
        row("relu", Relu(), "over the keys a query sees"),
        row("entmax 1.5", Entmax15()),
        row("sparsemax", Sparsemax()),
        row("ssmax", SSMax(), "s from 0.43, learned per head"),
        row("differential", Differential(), "weights are signed: no shares, entropy or sparsity"),
        row("softmax + output gate", Softmax(), "elementwise, from the layer's input", **{GATE: OutputGate()}),
        row("softmax + value gate", Softmax(), "elementwise, from the values", **{GATE: ValueGate()}),
    ),
)
