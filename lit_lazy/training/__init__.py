"""Training of one run: Lightning module, optimiser, trainer, checkpoints, result."""
