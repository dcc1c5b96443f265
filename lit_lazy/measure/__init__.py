"""What is measured of a model: torchmetrics that accumulate over batches and reduce over processes."""

from lit_lazy.measure.attention import AttentionMetrics
from lit_lazy.measure.collapse import Collapse
from lit_lazy.measure.heads import Entropy, GaussianNull, Mass, ScoreSpread, Sink, Sparsity, ValueNorms, null_sparsity
from lit_lazy.measure.ratio import RatioOfSums
from lit_lazy.measure.rows import RowSummary, summarise

__all__ = [
    "AttentionMetrics",
    "Collapse",
    "Entropy",
    "GaussianNull",
    "Mass",
    "RatioOfSums",
    "RowSummary",
    "ScoreSpread",
    "Sink",
    "Sparsity",
    "ValueNorms",
    "null_sparsity",
    "summarise",
]
