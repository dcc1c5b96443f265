"""Devices that a model is trained on, and the compiled backend of CPUs."""

import os

import psutil
import torch

from flash_lazy.cpu.library import find_obstacle, get_instruction_set
from flash_lazy.fused import configurations
from lit_lazy.support.checks import require
from lit_lazy.support.process import count_cores

BUSY_SECONDS, BUSY_CORES = 0.2, 0.5
"""How long other processes are watched, and how many cores of those of the threads may be busy."""


def select_training_device() -> torch.device:
    """The current accelerator, chosen as by Lightning, or the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def find_missing_backend() -> str | None:
    """Why training here lacks the compiled backend, with the fix; None if it has it or runs on an accelerator."""
    return find_obstacle() if select_training_device().type == "cpu" else None


def find_missing_gpu(backend: str) -> str | None:
    """Why this machine cannot run a model's backend that needs a GPU, with the fix; None if it can."""
    if backend != "triton" or torch.cuda.is_available() or configurations.INTERPRETED:
        return None
    return "needs a GPU, and this machine has none; leave it at auto, or give chunked"


def describe_backend(label: str) -> str:
    """A backend's label in tables; that of the compiled backend with its instruction set, as in `cpu (avx512)`."""
    return f"{label} ({get_instruction_set()})" if label == "cpu" else label


def find_busy_cores() -> str | None:
    """That other processes use cores of this one's threads, which then wait for each other, with the fix; else None."""
    threads, cores = torch.get_num_threads(), count_cores()
    if threads == 1 or select_training_device().type != "cpu":
        return None
    busy = psutil.cpu_percent(BUSY_SECONDS) / 100 * cores
    if busy + threads < cores + BUSY_CORES:
        return None
    return f"other work keeps {busy:.1f} of {cores} cores busy; a small model is faster beside it with --threads 1"


def check_devices(devices: int) -> None:
    """Raises ValueError if this machine has fewer devices."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    available, kind = (gpus, "GPUs") if gpus else (count_cores(), "cores")
    require(devices <= available, "--devices", devices, f"must be at most the {available} {kind} of this machine")


def read_torchrun_size() -> int | None:
    """Number of processes that torchrun started on all machines; None if this process was not started by torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None
