"""Table 2's variants: each part of Lazy Attention removed, changed or replaced, against the full mechanism."""

from lit_lazy.attention import Alibi, Elastic, Fire, KerpleLog, LearnedBias, NoBias, NoPosition, Softmax, T5Bias
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.table.columns import COLUMNS, HEAD_COLUMNS, LOSS
from lit_lazy.table.designs import main_effects
from lit_lazy.table.records import Contrast

PAPER, AUTHORS, OURS = "paper (via review)", "authors' code", "ours"
NORMALISER, BIAS, POSITION = "model.attention.normaliser", "model.attention.bias", "model.position"
FIVE_SEEDS = (0, 1, 2, 3, 4)
TWO_BY_TWO = {
    "softmax": {"normaliser": "softmax", "bias": "none"},
    "softmax + learned bias": {"normaliser": "softmax", "bias": "learned"},
    "elastic without bias": {"normaliser": "elastic", "bias": "none"},
    "lazy": {"normaliser": "elastic", "bias": "learned"},
}


def row(name, source, normaliser=Elastic(), bias=LearnedBias(), seeds=None, note="", **changes) -> Row:  # noqa: B008
    return Row(name, {NORMALISER: normaliser, BIAS: bias, **changes}, source, seeds, note)


ablation = Ablation(
    name="table2",
    baseline="lazy",
    seeds=(0, 1, 2),
    columns=(*COLUMNS, *HEAD_COLUMNS),
    primary=LOSS,
    rows=(
        row("softmax", PAPER, Softmax(), NoBias(), FIVE_SEEDS),
        row("softmax + learned bias", PAPER, Softmax(), seeds=FIVE_SEEDS),
        row("elastic without bias", PAPER, bias=NoBias(), seeds=FIVE_SEEDS),
        row("lazy", PAPER, seeds=FIVE_SEEDS, note="RoPE + learned bias + elastic, tau_init 1, per_query"),
        row("lazy tau_init 0", OURS, Elastic(tau_init=0.0)),
        row("lazy tau_init 0.5", OURS, Elastic(tau_init=0.5)),
        row("lazy tau_init 2", OURS, Elastic(tau_init=2.0)),
        row("lazy seq_len", PAPER, Elastic(threshold="seq_len"), note="tau / training context, read literally"),
        row("lazy per_token", PAPER, Elastic(threshold="per_token"), note="one tau per position, read literally"),
        row(
            "lazy constant",
            AUTHORS,
            Elastic(tau_init=0.01, threshold="constant", tau_lr_scale=0.01),
            note="tau_init 0.01 as in their first version, which had neither RoPE nor a table by distance; "
            "tau's learning rate x 0.01",
        ),
        row("lazy renormalised", OURS, Elastic(renormalise=True)),
        row(
            "lazy ALiBi",
            OURS,
            bias=Alibi(slopes=(0.5,)),
            note="slope 1/2 in every head; by the paper's rule a model of one head would have 1/256, next to none",
        ),
        row("lazy T5", OURS, bias=T5Bias()),
        row("lazy KERPLE", OURS, bias=KerpleLog()),
        row("lazy FIRE", OURS, bias=Fire()),
        row("lazy no RoPE", OURS, **{POSITION: NoPosition()}),
        row("lazy frozen tau", OURS, Elastic(learn_tau=False)),
    ),
    contrasts=(
        *main_effects(TWO_BY_TWO),
        Contrast("elastic, no bias", {"elastic without bias": 1, "softmax": -1}),
        Contrast("elastic, learned bias", {"lazy": 1, "softmax + learned bias": -1}),
        Contrast(
            "interaction",
            {"lazy": 1, "softmax + learned bias": -1, "elastic without bias": -1, "softmax": 1},
        ),
    ),
)
