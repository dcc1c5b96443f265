"""Where a model is trained."""

import torch

from lit_lazy.support.checks import require
from lit_lazy.support.machine import count_cores


def select_training_device() -> torch.device:
    """The accelerator that there is, as Lightning chooses it, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def check_devices(devices: int) -> None:
    """Raise ValueError where this machine has not so many to share a batch."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there, kind = (gpus, "GPUs") if gpus else (count_cores(), "cores")
    require(devices <= there, "--devices", devices, f"must be at most the {there} {kind} of this machine")
