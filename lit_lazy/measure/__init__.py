"""Measurements of a model: torchmetrics that accumulate over batches and reduce over processes."""

from lit_lazy.measure.attention_metrics import AttentionMetrics
from lit_lazy.measure.collapse import Collapse
from lit_lazy.measure.head_metrics import (
    Entropy,
    GaussianNull,
    Mass,
    ScoreSpread,
    Sink,
    Sparsity,
    ValueNorms,
    null_sparsity,
)
from lit_lazy.measure.ratio_of_sums import RatioOfSums
from lit_lazy.measure.row_statistics import RowSummary, summarise

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
