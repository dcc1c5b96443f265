"""Where a model is trained."""

import torch


def training_device() -> torch.device:
    """The accelerator that there is, as Lightning chooses it, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
