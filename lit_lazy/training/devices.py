"""Devices that a model is trained on."""

import os

import torch

from lit_lazy.support.checks import require


def select_training_device() -> torch.device:
    """The current accelerator, chosen as by Lightning, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def count_cores() -> int:
    """CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only; otherwise a process may use every core
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def check_devices(devices: int) -> None:
    """Raises ValueError if this machine has fewer devices."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    available, kind = (gpus, "GPUs") if gpus else (count_cores(), "cores")
    require(devices <= available, "--devices", devices, f"must be at most the {available} {kind} of this machine")
