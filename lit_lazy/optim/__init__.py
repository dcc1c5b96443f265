"""Optimisers and learning rate schedules. Needs only torch."""

from lit_lazy.optim.optimiser import SGD, AdamW, Muon, Optimiser
from lit_lazy.optim.schedule import WSD, Constant, Cosine, Schedule

__all__ = ["SGD", "WSD", "AdamW", "Constant", "Cosine", "Muon", "Optimiser", "Schedule"]
