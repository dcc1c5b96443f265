"""Frozen dataclasses with the settings of a run."""

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from typing import Literal

from lit_lazy.attention import AttentionSpec, LayerShape, Mixer, MixerModule, Position, Rope, SelfAttention
from lit_lazy.attention.normaliser import AttentionBackend
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.data import DataConfig
from lit_lazy.optim import AdamW, Cosine, Distillation, NoDistillation, Optimiser, Schedule
from lit_lazy.support.checked_fields import CheckedFields
from lit_lazy.support.checks import MOST_FACTOR, MOST_RATE, require, require_field, require_positive, require_whole

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class ModelConfig(CheckedFields, prefix="model."):
    """A decoder language model: pre-norm, RMSNorm, SwiGLU."""

    first_values = ("init_std", "embedding_init_std", "residual_dropout")

    d_model: int = 64
    """Width of the residual stream."""
    n_layers: int = 1
    """Number of blocks."""
    n_heads: int = 1
    """Query heads per block."""
    n_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); None for one per query head."""
    head_dim: int | None = None
    """Width of a head; None for d_model / n_heads."""
    d_ff: int = 256
    """Hidden width of the SwiGLU."""
    mlp_bias: bool = False
    """Add a learned vector, at first 0, in each linear layer of the SwiGLU."""
    norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm of blocks, queries and keys, and of the output."""
    attention: AttentionSpec = field(default_factory=AttentionSpec)
    """The attention variant."""
    position: Position = field(default_factory=Rope)
    """The positional encoding."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the output head."""
    init_std: float = 0.02
    """Standard deviation of initial weight matrices, and of token embeddings unless embedding_init_std is set."""
    embedding_init_std: float | None = None
    """Standard deviation of initial token embeddings, and of a tied output head; None for init_std."""
    backend: AttentionBackend = "auto"
    """Implementation of attention; auto picks the fastest and changes nothing beyond rounding."""
    mixer: Mixer = field(default_factory=SelfAttention)
    """The token mixer: attention, or a recurrent layer instead."""
    residual_dropout: float = 0.0
    """Dropout probability of the outputs of mixers and SwiGLUs in training (arXiv 1706.03762)."""

    def initial_values(self) -> tuple[str, ...]:
        return ("init_std", "embedding_init_std")

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "d_ff"):
            require_whole(f"model.{name}", getattr(self, name), 1)
        if self.head_dim is None:
            divides = self.d_model % self.n_heads == 0
            require_field(self, "model.n_heads", divides, f"must divide model.d_model={self.d_model}")
        else:
            require_whole("model.head_dim", self.head_dim, 1)
        small = math.isfinite(self.norm_eps) and self.norm_eps > 0
        require_field(self, "model.norm_eps", small, "must be finite and above 0")
        divides = self.kv_heads >= 1 and self.n_heads % self.kv_heads == 0
        require_field(self, "model.n_kv_heads", divides, f"must divide model.n_heads={self.n_heads}")
        positive = math.isfinite(self.init_std) and self.init_std > 0
        require_field(self, "model.init_std", positive, "must be finite and above 0 (zero queries never learn)")
        std = self.embedding_init_std
        positive = std is None or (math.isfinite(std) and std > 0)
        require_field(
            self, "model.embedding_init_std", positive, "must be finite and above 0, or None for model.init_std"
        )
        require_field(self, "model.residual_dropout", 0 <= self.residual_dropout < 1, "must be at least 0, below 1")
        allowed = typing.get_args(AttentionBackend)
        require_field(self, "model.backend", self.backend in allowed, f"must be one of {', '.join(allowed)}")
        if not self.mixer.attends:
            self._check_without_attention()

    def _check_without_attention(self) -> None:
        fix = f"has no effect in model.mixer={type(self.mixer).__name__}, without attention; leave one of the two out"
        default = AttentionSpec()
        for part in dataclasses.fields(default):
            value = getattr(self.attention, part.name)
            require(value == getattr(default, part.name), f"model.attention.{part.name}", value, fix)
        for name in ("n_kv_heads", "head_dim"):
            require_field(self, f"model.{name}", getattr(self, name) is None, fix)
        require_field(self, "model.backend", self.backend == "auto", fix)

    @property
    def rule(self) -> str:
        """Class names of the normaliser and the bias, or of the mixer of a model without attention."""
        parts = [self.attention.normaliser, self.attention.bias] if self.mixer.attends else [self.mixer]
        return ", ".join(type(part).__name__ for part in parts)

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        """Width of each head."""
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    def layer_shape(self, layer: int, context_length: int) -> LayerShape:
        """Sizes of the attention of one layer, counted from 0."""
        return LayerShape(
            *(self.n_heads, self.kv_heads, self.head_width, self.d_model, context_length, layer),
            n_layers=self.n_layers,
            norm_eps=self.norm_eps,
        )

    def build_mixer(self, layer: int, context_length: int) -> MixerModule:
        """The token mixer of one layer, counted from 0."""
        shape = self.layer_shape(layer, context_length)
        if isinstance(self.mixer, SelfAttention):
            return self.mixer.build(shape, self.attention, self.backend)
        return self.mixer.build(shape)


@dataclass(frozen=True)
class TrainConfig(CheckedFields, prefix="train."):
    """Optimiser, schedule, loss and logging of one training."""

    steps: int = 1200
    """Optimiser steps."""
    batch_size: int = 32
    """Sequences per step."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup_steps: int = 50
    """Steps of linear warm-up, the first at 1 / warmup_steps of the peak."""
    final_lr_fraction: float = 0.1
    """The schedule ends at this fraction of the peak."""
    weight_decay: float = 0.01
    """Decay of weight matrices; norms, tau, biases and embeddings are never decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Moment decays of AdamW, and of AdamW's part of Muon."""
    clip_norm: float = 1.0
    """Gradients are clipped to this global norm."""
    precision: Precision = "fp32"
    """fp32, or bf16 mixed precision (parameters, tau and bias stay fp32)."""
    val_every: int = 200
    """Steps between validations."""
    checkpoint_every: int = 400
    """Steps between checkpoints, from which a killed run resumes."""
    log_every: int = 50
    """Steps between logged training metrics."""
    optimiser: Optimiser = field(default_factory=AdamW)
    """The optimiser."""
    schedule: Schedule = field(default_factory=Cosine)
    """The learning rate after the warm-up."""
    ema_decay: float = 0.0
    """Decay per step of an exponential moving average of the weights, which is validated and saved; 0 for none."""
    z_loss: float = 0.0
    """Factor of the mean squared log of the softmax's normaliser, added to the loss (arXiv 2204.02311); 0 for none."""
    trainable: tuple[str, ...] = ()
    """Patterns of the names of the parameters to train, such as blocks.*.attention.normaliser.tau; the others keep
    their values of init_from. Empty to train all."""
    distillation: Distillation = field(default_factory=NoDistillation)
    """A term of the loss that compares with the model of init_from as it was."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "val_every", "checkpoint_every", "log_every"):
            require_whole(f"train.{name}", getattr(self, name), 1)
        require_positive("train.lr", self.lr, MOST_RATE)
        clips = math.isfinite(self.clip_norm) and self.clip_norm > 0
        require_field(self, "train.clip_norm", clips, "must be finite and above 0")
        for name in ("weight_decay", "z_loss"):
            within = math.isfinite(value := getattr(self, name)) and 0 <= value <= MOST_FACTOR
            require_field(self, f"train.{name}", within, f"must be from 0 to {MOST_FACTOR:g}")
        warm = 0 <= self.warmup_steps < self.steps
        require_field(self, "train.warmup_steps", warm, f"must be at least 0 and below train.steps={self.steps}")
        require_field(self, "train.final_lr_fraction", 0 <= self.final_lr_fraction <= 1, "must be in [0, 1]")
        pair = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require_field(self, "train.betas", pair, "must be two numbers, each at least 0 and below 1")
        require_field(self, "train.ema_decay", 0 <= self.ema_decay < 1, "must be at least 0 and below 1")
        for name, part, used in (
            ("betas", "optimiser", self.optimiser.adaptive),
            ("final_lr_fraction", "schedule", self.schedule.falls),
        ):
            chosen, default = type(getattr(self, part)).__name__, getattr(TrainConfig, name)
            fix = f"has no effect with train.{part}={chosen}; leave it at {default}"
            require_field(self, f"train.{name}", used or getattr(self, name) == default, fix)
        known = self.precision in typing.get_args(Precision)
        require_field(
            self, "train.precision", known, "must be fp32 or bf16 (mixed; a pure bf16 would round tau and bias away)"
        )


@dataclass(frozen=True)
class RunConfig(CheckedFields, prefix=""):
    """One training: model x data x trainer, and the seed of weights and batch order."""

    data: DataConfig
    """Training and validation data."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The training."""
    seed: int = 0
    """Seed of the initial weights and of the batch order."""
    init_from: str | None = None
    """Checkpoint whose weights initialise the model where name and shape match; None for none."""
    evaluations: tuple[Evaluation, ...] = ()
    """Measurements of the final model in addition to the usual metrics."""
    diagnosed_sequences: int = 64
    """Evenly spaced validation sequences on which attention is diagnosed, at most, before and after training."""

    def __post_init__(self) -> None:
        require_whole("seed", self.seed, 0)
        require_whole("diagnosed_sequences", self.diagnosed_sequences, 1)
        for number, evaluation in enumerate(self.evaluations):
            require(
                evaluation not in self.evaluations[:number], "evaluations", evaluation, "is given twice; leave one out"
            )
