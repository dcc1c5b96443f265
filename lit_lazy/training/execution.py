"""How a run is executed, apart from what it is: no part of its key, kept with its result, and no more than rounding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lit_lazy.config.schema import TrainConfig
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.checks import require, require_whole

Strategy = Literal["ddp", "fsdp"]


@dataclass(frozen=True)
class Execution:
    """Which devices share a batch, and what of it they hold at a time."""

    devices: int = 1
    """Processes that share every batch: one for each GPU, or each with CPU threads of its own."""
    strategy: Strategy = "ddp"
    """ddp: each device holds the whole model. fsdp: parameters and optimiser states are spread over the devices."""
    micro_batch: int | None = None
    """Sequences in a device's memory at a time; None for its whole share of a batch."""
    compile: bool = False
    """torch.compile the model's training step."""
    checkpoint_activations: bool = False
    """Keep a block's input alone for the backward pass, and compute the rest of it again there."""

    def __post_init__(self) -> None:
        require_whole("--devices", self.devices, 1)
        require(self.strategy in get_args(Strategy), "--strategy", self.strategy, "must be ddp or fsdp")
        require(
            self.strategy == "ddp" or self.devices > 1,
            "--strategy",
            self.strategy,
            "spreads a model over devices; add --devices 2 or more",
        )
        require(
            not (self.compile and self.strategy == "fsdp"), "--compile", True, "has not been tried with --strategy fsdp"
        )
        if self.micro_batch is not None:
            require_whole("--micro-batch", self.micro_batch, 1)

    def check(self, train: TrainConfig) -> None:
        """Raise ValueError where a training cannot be executed in this way."""
        if self.strategy == "fsdp":
            fix = "has not been tried with --strategy fsdp; give --strategy ddp"
            whole = not train.optimiser.needs_whole_matrices
            require(whole, "train.optimiser", type(train.optimiser).__name__, fix)
            require(not train.ema_decay, "train.ema_decay", train.ema_decay, fix)

    def accumulation_steps(self, batch_size: int) -> int:
        """Micro-batches of a step on each device. Raises ValueError where a batch cannot be shared out evenly."""
        require(
            batch_size % self.devices == 0,
            "--devices",
            self.devices,
            f"must divide train.batch_size={batch_size}; choose another number, or another batch",
        )
        share = batch_size // self.devices
        micro = share if self.micro_batch is None else self.micro_batch
        require(
            share % micro == 0,
            "--micro-batch",
            micro,
            f"must divide the {share} of {batch_size} sequences that each device has of a batch",
        )
        return share // micro

    def evaluation_batch_size(self, batch_size: int) -> int:
        """Sequences to evaluate at a time."""
        return self.micro_batch or batch_size // self.devices

    def prepare_forward(self, model: DecoderLM) -> Callable[[Tensor, Tensor | None, Tensor | None], Tensor]:
        """The forward pass of training, as `DecoderLM.hidden`: tokens, places, dropout's keys to hidden states."""
        model.checkpoint_activations = self.checkpoint_activations
        return torch.compile(model.compute_hidden) if self.compile else model.compute_hidden


ONE_DEVICE = Execution()
"""The plain way."""
