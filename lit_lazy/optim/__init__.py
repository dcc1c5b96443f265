"""Optimisers, learning rate schedules and distillation. Needs only torch."""

from lit_lazy.optim.distillation import AttentionOutputs, Distillation, Logits, NoDistillation
from lit_lazy.optim.optimiser import SGD, WSD, AdamW, Constant, Cosine, Muon, Optimiser, Schedule

__all__ = [
    "SGD",
    "WSD",
    "AdamW",
    "AttentionOutputs",
    "Constant",
    "Cosine",
    "Distillation",
    "Logits",
    "Muon",
    "NoDistillation",
    "Optimiser",
    "Schedule",
]
