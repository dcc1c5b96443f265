"""What is measured of a model: torchmetrics that accumulate over batches and reduce over processes."""

from lit_lazy.metrics.attention import AttentionMetrics
from lit_lazy.metrics.ratio import RatioOfSums

__all__ = ["AttentionMetrics", "RatioOfSums"]
