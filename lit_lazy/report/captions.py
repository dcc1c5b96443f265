"""What a report says of its figures and words."""

CAPTIONS = {
    "verdict": (
        "What the verdict rests on",
        "Each declared contrast with the interval that its rule looks at; they hold together. A claimed difference is "
        "refuted too where it is the same within the margin, which two one-sided tests find by a narrower interval.",
    ),
    "effects": (
        "Differences to the baseline",
        "A filled marker is a difference that the seeds tell apart from chance; look how wide the others' 95 % "
        "intervals are before reading them as no effect.",
    ),
    "loss_against_sparsity": (
        "Loss against sparsity",
        "Look for a trend over the variants, and whether the 95 % intervals are small enough to show one: zeros are "
        "free only where the loss does not rise with them. A colour is a normaliser's, the same in all figures.",
    ),
    "tau_over_training": (
        "Offset parameter over training",
        "Look where tau goes from its start, and whether the seeds agree.",
    ),
    "sink_over_training": (
        "First key over training",
        "Of four validation sequences, whether or not there is something to fetch. Look at step 0 first, for what is "
        "there before training was not learned; then for a rise.",
    ),
    "attention_maps": (
        "Attention maps",
        "Of each of up to four layers the head that gives the first key the greatest share of its mass (where weights "
        "can be negative, the greatest weight). Look for a bright first column, which is a sink, and tell zero weights "
        "from small ones.",
    ),
    "sink_heatmap": (
        "Sinks by layer and head",
        "Look for heads whose weight on the first keys lies above 0.3, and in which layers they are.",
    ),
    "mass_by_position": (
        "Row mass by position",
        "Look for layers whose mass lies far from 1, and for a drift with position.",
    ),
    "sparsity_by_layer": (
        "Sparsity by layer",
        "Look how far the zeros exceed the untrained model and, where there is a threshold, the null model: zeros up "
        "to those are what Gaussian scores give.",
    ),
    "tau_by_layer": (
        "Offset parameter by layer",
        "Look whether tau moved from its start, and how far the heads of a layer differ.",
    ),
    "tau_by_head": (
        "Offset parameter over training, by head",
        "Look when each head leaves its start, and whether the heads of a layer part from each other.",
    ),
    "bias_curves": (
        "Bias by distance",
        "Look for heads that prefer near keys or a certain distance; a flat curve has learned nothing.",
    ),
    "value_norms": (
        "Value norms",
        "Look for first keys with a norm far below 1: weight on them adds almost nothing, as a sink's does.",
    ),
    "rank_profile": (
        "Rank through the layers",
        "Look for an effective rank that falls with depth: the tokens become alike.",
    ),
    "loss_by_length": (
        "Loss by position and length",
        "Look whether the loss keeps falling with more context, and where it rises beyond the length of training.",
    ),
}
"""Title of each figure, and a sentence that says what to look for."""

ONE_SEED = (
    "Each variant is shown by its first complete seed with diagnostics: an illustration with n = 1. What holds over "
    "seeds is in the table."
)

ABOUT_READING = "The table's own signs are explained below it. The words of table and figures:"

READING = {
    "Weight": ["What a value is multiplied with: the normaliser's output, after renormalising where it does so."],
    "Sink rate": [
        "Share of sequences and heads, over all layers, in which the first key's weight exceeds 0.3 on average "
        "over the rows (Gu et al. 2024). Low where little mass is left, whatever becomes of it: the rate of the "
        "share counts it against the mass, and is noise where there is next to none."
    ],
    "Share": [
        "The first key's part of what survived: the sum of its weights over the sum of all weights of the same "
        "rows. Compare normalisers by the share, for a smaller weight may only mean a smaller mass; it is not "
        "defined where almost no mass is left, nor where weights can be negative."
    ],
    "Mass": [
        "Sum of a row's weights before any renormalising: 1 for a softmax, less where weights are cut or need not "
        "add up. An empty row has none; a dead head has only empty rows from position 2 on."
    ],
    "Sparsity": [
        "Share of the visible keys, over sequences, heads and rows, whose weight is exactly 0: with a threshold, those "
        "whose probability is at or below it. Not defined where no weight can be 0, as of a softmax, or where weights "
        "can be negative."
    ],
    "Null": [
        "The sparsity of independent normal scores, row by row, with the row's own spread, number of keys and "
        "threshold. Zeros up to it say nothing of what was learned: at tau = 1 it is one half or more, whatever the "
        "spread."
    ],
    "Tau": [
        "The offset parameter: the threshold is tau divided by the number of visible keys, where a variant's name "
        "or note says nothing else."
    ],
    "Effective rank": [
        "Exponential of the entropy of a sequence's singular values in the residual stream, scaled to sum to 1 "
        "(Roy and Vetterli 2007), not centred: 1 where all tokens point one way."
    ],
}
"""Words of table and figures, each with what it means."""
