"""Optimisers, learning rate schedules and distillation. Needs only torch."""

from lit_lazy.optim.optimisers_schedules_distillation import (
    SGD,
    WSD,
    AdamW,
    AttentionOutputs,
    Constant,
    Cosine,
    Distillation,
    Logits,
    Muon,
    NoDistillation,
    Optimiser,
    Schedule,
)

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
