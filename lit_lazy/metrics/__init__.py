"""What is measured of a model: torchmetrics that accumulate over batches and reduce over processes."""

from lit_lazy.metrics.attention import AttentionMetrics
from lit_lazy.metrics.collapse import Collapse
from lit_lazy.metrics.heads import Entropy, Mass, ScoreSpread, Sink, Sparsity, ValueNorms, null_sparsity
from lit_lazy.metrics.ratio import RatioOfSums
from lit_lazy.metrics.rows import RowSummary, summarise

__all__ = [
    "AttentionMetrics",
    "Collapse",
    "Entropy",
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
