"""How and where a run is executed: not part of its key, and without effect beyond rounding."""

from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from flash_lazy.cpu.library import find_obstacle, get_instruction_set
from flash_lazy.fused import configurations
from lit_lazy.config.schema import TrainConfig
from lit_lazy.support.checked_fields import CheckedFields, PositiveInt, require
from lit_lazy.support.machine import count_cores

BUSY_SECONDS, BUSY_CORES = 0.2, 0.5
"""How long other processes are watched, and how many cores of those of the threads may be busy."""


@dataclass(frozen=True)
class Execution(CheckedFields):
    """Devices that share a batch, and memory options."""

    devices: PositiveInt = 1
    """Processes that share every batch: one per GPU, or each with separate CPU threads."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each device holds the full model. fsdp: parameters and optimiser states are sharded over the devices."""
    micro_batch: PositiveInt | None = None
    """Sequences in a device's memory at a time; None for its full share of a batch."""
    compile: bool = False
    """torch.compile the model's training step."""
    checkpoint_activations: bool = False
    """Save only each block's input for the backward pass, and recompute the rest there."""

    def __post_init__(self) -> None:
        fix = "shards a model over devices; add --devices 2 or more"
        require(self.strategy == "ddp" or self.devices > 1, "--strategy", self.strategy, fix)
        require(not (self.compile and self.strategy == "fsdp"), "--compile", True, "is untested with --strategy fsdp")

    @property
    def is_plain(self) -> bool:
        """Whether a training step may run as one call of compiled code, which is neither sharded nor traced."""
        return self.strategy == "ddp" and not self.compile and not self.checkpoint_activations

    def check(self, train: TrainConfig) -> None:
        """Raises ValueError if this execution does not support the training."""
        if self.strategy == "fsdp":
            fix = "is untested with --strategy fsdp; give --strategy ddp"
            shardable = not train.optimiser.needs_whole_matrices
            require(shardable, "train.optimiser", type(train.optimiser).__name__, fix)
            require(not train.ema_decay, "train.ema_decay", train.ema_decay, fix)
        if self.strategy == "fsdp" or self.compile:
            fix = "is untested with --compile and --strategy fsdp; leave them out"
            require(not train.distillation.active, "train.distillation", type(train.distillation).__name__, fix)

    def accumulation_steps(self, batch_size: int) -> int:
        """Micro-batches per step on each device. Raises ValueError if a batch cannot be divided evenly."""
        fix = f"must divide train.batch_size={batch_size}; change one of the two"
        require(batch_size % self.devices == 0, "--devices", self.devices, fix)
        share = batch_size // self.devices
        micro = share if self.micro_batch is None else self.micro_batch
        fix = f"must divide the {share} of {batch_size} sequences of a batch on each device"
        require(share % micro == 0, "--micro-batch", micro, fix)
        return share // micro

    def evaluation_batch_size(self, batch_size: int) -> int:
        """Sequences to evaluate at a time."""
        return self.micro_batch or batch_size // self.devices


ONE_DEVICE = Execution()
"""The default: one device, no memory options."""


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
