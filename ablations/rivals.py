"""Lazy Attention compared with its rivals: 16 other rules for the weights, and softmax gated or normed."""

from lit_lazy.attention import (
    AffineScaled,
    ASEntmax,
    ClippedSoftmax,
    Differential,
    Elastic,
    Entmax15,
    HeadNorm,
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
    Thresholded,
    ThresholdedDifferential,
    TopK,
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
        row("asentmax", ASEntmax(), "scale learned from the input and ln n"),
        row("top k", TopK(), "a quarter of the keys a query sees"),
        row("thresholded", Thresholded(), "cosines above a threshold that follows n, not normalised"),
        row("thresholded + head norm", Thresholded(), "as its authors norm it", **{GATE: HeadNorm()}),
        # At beta 1 no cosine of half a head's width of 16 exceeds the threshold; the authors report 0.5 to 1 as alike.
        row("thresholded differential", ThresholdedDifferential(beta=0.7), "beta 0.7; weights are signed"),
        row("affine-scaled", AffineScaled(), "weights are signed and sum to a running mean"),
        row("ssmax", SSMax(), "s from 0.43, learned per head"),
        row("differential", Differential(), "weights are signed: no shares, entropy or sparsity"),
        row("softmax + output gate", Softmax(), "elementwise, from the layer's input", **{GATE: OutputGate()}),
        row("softmax + value gate", Softmax(), "elementwise, from the values", **{GATE: ValueGate()}),
        row("softmax + head norm", Softmax(), "RMSNorm of each head's output", **{GATE: HeadNorm()}),
    ),
)
