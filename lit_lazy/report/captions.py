"""The captions of a report's figures, and its glossary."""

CAPTIONS = {
    "verdict": "What the verdict rests on. Each declared contrast at the looks that were made, with the regions in "
    "which its rule supports or refutes the claim; the intervals of all looks and contrasts hold simultaneously.",
    "effects": "Differences to the baseline. A filled marker is a difference that is significant over the seeds. "
    "Check the width of the other 95 % intervals before reading them as no effect.",
    "loss_against_sparsity": "Loss against sparsity. Look for a trend over the variants, and check whether the 95 % "
    "intervals are narrow enough to show one: zeros are free only if the loss does not rise with them. Each "
    "normaliser has the same colour in all figures.",
    "loss_over_training": "Validation loss over training. Look for variants that learn later than the baseline, for "
    "those still falling at the end, and whether the seeds agree.",
    "tau_over_training": "Offset parameter over training. Check how it moves from its initial value, and whether the "
    "seeds agree.",
    "sink_over_training": "First key over training. Measured on four validation sequences, at rows with and without "
    "something to retrieve. Look at step 0 first: what is present before training was not learned. Then look for a "
    "rise.",
    "attention_maps": "Attention maps. For each of up to four layers, the head with the largest share of its mass on "
    "the first key (the largest weight if weights can be negative). Look for a bright first column, which is a sink, "
    "and distinguish zero weights from small ones.",
    "sink_heatmap": "Sinks by layer and head. Look for heads with more than 0.3 of the weight on the first key, and "
    "for the layers they are in.",
    "mass_by_position": "Row mass by position. Look for layers with a mass far from 1, and for a drift with position.",
    "sparsity_by_layer": "Sparsity by layer. Compare the zeros with those at the start and, if there is a threshold, "
    "with the null model: Gaussian scores alone give as many zeros as the null model.",
    "tau_by_layer": "Offset parameter by layer. Check whether tau moved from its initial value, and how much the "
    "heads of a layer differ.",
    "parameters_by_head": "Learned parameters over training, by head. Check when each head leaves its initial value, "
    "and whether the heads of a layer move apart.",
    "bias_curves": "Bias by distance. Look for heads that prefer nearby keys or a certain distance; a flat curve has "
    "learned nothing.",
    "value_norms": "Value norms. Look for first keys with a norm far below 1: as with a sink, weight on them adds "
    "almost nothing.",
    "sink_kinds": "Kinds of sinks. A sink below the dashed line has next to no value: weight on it is no operation. "
    "One in the dotted corner has a value of the usual size, and its head adds nearly the same to all tokens: a "
    "broadcast (Fesser et al. 2026). Look for the block from which on single entries are far above the median: such "
    "outliers come with sinks and make low precision costly.",
    "rank_profile": "Rank through the layers. Look for an effective rank that falls with depth: the tokens become "
    "similar.",
    "loss_by_length": "Loss by position and length. Check whether the loss keeps falling with more context, and "
    "where it rises beyond the training length.",
}
"""Caption of each figure: its title, which ends at the first full stop, and what to look for."""

ONE_SEED = (
    "Each variant is illustrated by its first complete seed with diagnostics (n = 1). Results over seeds are in the "
    "table."
)

ABOUT_READING = "The legend below the table explains its symbols. Terms of the table and figures:"

READING = {
    "Weight": "The factor of a value: the normaliser's output, after renormalisation if there is one.",
    "Sink rate": "Share of sequences and heads, over all layers, whose weight on the first key averages more than "
    "0.3 over the rows (Gu et al. 2024). It is low if little mass is left, however that mass is distributed. The "
    "sink rate of the share divides the weight by the mass; it is noise if almost no mass is left.",
    "Share": "The first key's part of the surviving mass: the sum of its weights over the sum of all weights of the "
    "same rows. Compare normalisers by the share, because a smaller weight may only reflect a smaller mass. It is "
    "undefined if almost no mass is left or weights can be negative.",
    "Mass": "Sum of a row's weights before renormalisation: 1 for softmax, less if weights are cut or need not sum "
    "to 1. An empty row has no mass; a dead head has only empty rows from position 2 on.",
    "Sparsity": "Share of the visible keys, over sequences, heads and rows, with a weight of exactly 0; with a "
    "threshold, keys whose probability does not exceed it. It is undefined if no weight can be 0 (softmax) or "
    "weights can be negative.",
    "Null": "The sparsity of independent normal scores, computed row by row with the row's spread, number of keys "
    "and threshold. Zeros up to this level are no evidence of learning: at tau = 1 they are half of the keys or "
    "more, at any spread.",
    "Tau": "The offset parameter: the threshold is tau divided by the number of visible keys, unless the name or "
    "note of a variant states otherwise.",
    "Effective rank": "Exponential of the entropy of the singular values of a sequence's residual stream, scaled to "
    "sum to 1 (Roy and Vetterli 2007), not centred: 1 if all tokens point in one direction.",
}
"""Terms of the table and figures with their definitions."""
