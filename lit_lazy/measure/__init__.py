"""Measurements of a model: torchmetrics that accumulate over batches, and evaluations."""
