"""How a run is executed: not part of its key, recorded with its result, and without effect beyond rounding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_lazy.config.schema import TrainConfig
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.checks import CheckedFields, PositiveInt, require

Strategy = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class Execution(CheckedFields):
    """Devices that share a batch, and memory options."""

    devices: PositiveInt = 1
    """Processes that share every batch: one per GPU, or each with separate CPU threads."""
    strategy: Strategy = "ddp"
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

    def prepare_forward(self, model: DecoderLM) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
        """The training's forward pass, `DecoderLM.compute_hidden`: tokens, places and dropout keys to hidden states."""
        model.checkpoint_activations = self.checkpoint_activations
        return torch.compile(model.compute_hidden) if self.compile else model.compute_hidden


ONE_DEVICE = Execution()
"""The default: one device, no memory options."""
