"""The paper's Table 1: softmax, Lazy Attention, RetNet, Mamba2 and Gated DeltaNet with matched parameters.

The mixers without attention have their papers' sizes, which exceed attention's. Their MLPs are narrower to compensate
(`model.d_ff`), computed for the experiment on which the rows run. docs/scale.md, "Benchmarks", adds the columns of the
paper's table, nine benchmarks on text.
"""

from lit_lazy.attention import (
    AttentionSpec,
    Elastic,
    GatedDeltaNet,
    LearnedBias,
    Mamba2,
    NoBias,
    NoPosition,
    RetNet,
    SelfAttention,
    Softmax,
)
from lit_lazy.config import RunConfig, replace_at
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.model.parameter_matching import matching_d_ff
from lit_lazy.table.columns import COLUMNS, LOSS

PAPER, AUTHORS = "paper (via review)", "authors' code"
MIXER, NORMALISER, BIAS = "model.mixer", "model.attention.normaliser", "model.attention.bias"
SOFTMAX = {MIXER: SelfAttention(), NORMALISER: Softmax(), BIAS: NoBias()}
LAZY = SOFTMAX | {NORMALISER: Elastic(), BIAS: LearnedBias()}

NO_POSITION = {"model.position": NoPosition()}


def without_attention(name, mixer, source, note, **changes) -> Row:
    """A row of a mixer with as many parameters as the softmax row."""
    changes |= {
        MIXER: mixer,
        # Reset the settings of attention: they would have no effect and be rejected.
        "model.attention": AttentionSpec(),
        "model.n_kv_heads": None,
        "model.backend": "auto",
    }

    def d_ff(base: RunConfig) -> int:
        return matching_d_ff(replace_at(base, changes).model, like=replace_at(base, SOFTMAX).model)

    return Row(name, changes | {"model.d_ff": d_ff}, source, note=f"{note}; d_ff narrower, for softmax's parameters")


ablation = Ablation(
    name="table1",
    baseline="softmax",
    seeds=(0, 1, 2),
    columns=COLUMNS,
    primary=LOSS,
    rows=(
        Row("softmax", SOFTMAX, PAPER, note="RoPE: Transformer++"),
        Row("lazy", LAZY, PAPER, note="RoPE + learned bias + elastic, tau_init 1, per_query"),
        without_attention("RetNet", RetNet(), PAPER, "RoPE, values twice as wide, swish gate"),
        without_attention("Mamba2", Mamba2(), PAPER, "expansion 2, short convolution", **NO_POSITION),
        without_attention("Gated DeltaNet", GatedDeltaNet(), AUTHORS, "short convolutions", **NO_POSITION),
    ),
)
