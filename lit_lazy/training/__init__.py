"""One training: the Lightning module, its optimiser, its trainer, checkpoints and result."""
