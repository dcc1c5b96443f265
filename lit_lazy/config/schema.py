"""Frozen dataclasses with the settings of a run."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Literal

from lit_lazy.attention import AttentionSpec, LayerShape, Mixer, MixerModule, Position, Rope, SelfAttention
from lit_lazy.attention.normaliser import AttentionBackend
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.data import DataConfig
from lit_lazy.optim import AdamW, Cosine, Distillation, NoDistillation, Optimiser, Schedule
from lit_lazy.support.checked_fields import (
    MOST_FACTOR,
    MOST_RATE,
    BelowOne,
    Bounds,
    CheckedFields,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Share,
    require,
)

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class ModelConfig(CheckedFields, prefix="model."):
    """A decoder language model: pre-norm, RMSNorm, SwiGLU."""

    first_values = ("init_std", "embedding_init_std", "residual_dropout")

    d_model: PositiveInt = 64
    """Width of the residual stream."""
    n_layers: PositiveInt = 1
    """Number of blocks."""
    n_heads: PositiveInt = 1
    """Query heads per block."""
    n_kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention); None for one per query head."""
    head_dim: PositiveInt | None = None
    """Width of a head; None for d_model / n_heads."""
    d_ff: PositiveInt = 256
    """Hidden width of the SwiGLU."""
    mlp_bias: bool = False
    """Add a learned vector, at first 0, in each linear layer of the SwiGLU."""
    norm_eps: PositiveFloat = 1e-6
    """Added to the mean square in every RMSNorm of blocks, queries and keys, and of the output."""
    attention: AttentionSpec = field(default_factory=AttentionSpec)
    """The attention variant."""
    position: Position = field(default_factory=Rope)
    """The positional encoding."""
    tie_embeddings: bool = True
    """Use the embedding matrix as the output head."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial weight matrices, and of token embeddings unless embedding_init_std is set."""
    embedding_init_std: PositiveFloat | None = None
    """Standard deviation of initial token embeddings, and of a tied output head; None for init_std."""
    backend: AttentionBackend = "auto"
    """Implementation of attention; auto picks the fastest and changes nothing beyond rounding."""
    mixer: Mixer = field(default_factory=SelfAttention)
    """The token mixer: attention, or a recurrent layer instead."""
    residual_dropout: BelowOne = 0.0
    """Dropout probability of the outputs of mixers and SwiGLUs in training (arXiv 1706.03762)."""

    def __post_init__(self) -> None:
        divides = self.head_dim is not None or self.d_model % self.n_heads == 0
        require(divides, "model.n_heads", self.n_heads, f"must divide model.d_model={self.d_model}")
        fix = f"must divide model.n_heads={self.n_heads}"
        require(self.n_heads % self.kv_heads == 0, "model.n_kv_heads", self.n_kv_heads, fix)
        if self.mixer.attends:
            return
        fix = f"has no effect in model.mixer={type(self.mixer).__name__}, without attention; leave one of the two out"
        default = AttentionSpec()
        for part in dataclasses.fields(default):
            value = getattr(self.attention, part.name)
            require(value == getattr(default, part.name), f"model.attention.{part.name}", value, fix)
        for name in ("n_kv_heads", "head_dim"):
            require(getattr(self, name) is None, f"model.{name}", getattr(self, name), fix)
        require(self.backend == "auto", "model.backend", self.backend, fix)

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

    steps: PositiveInt = 1200
    """Optimiser steps."""
    batch_size: PositiveInt = 32
    """Sequences per step."""
    lr: Annotated[float, Bounds(gt=0, le=MOST_RATE)] = 3e-3
    """Peak learning rate."""
    warmup_steps: NonNegativeInt = 50
    """Steps of linear warm-up, the first at 1 / warmup_steps of the peak."""
    final_lr_fraction: Share = 0.1
    """The schedule ends at this fraction of the peak."""
    weight_decay: Annotated[float, Bounds(ge=0, le=MOST_FACTOR)] = 0.01
    """Decay of weight matrices; norms, tau, biases and embeddings are never decayed."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Moment decays of AdamW, and of AdamW's part of Muon."""
    clip_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""
    precision: Precision = "fp32"
    """fp32, or bf16 mixed precision (parameters, tau and bias stay fp32)."""
    val_every: PositiveInt = 200
    """Steps between validations."""
    checkpoint_every: PositiveInt = 400
    """Steps between checkpoints, from which a killed run resumes."""
    log_every: PositiveInt = 50
    """Steps between logged training metrics."""
    optimiser: Optimiser = field(default_factory=AdamW)
    """The optimiser."""
    schedule: Schedule = field(default_factory=Cosine)
    """The learning rate after the warm-up."""
    ema_decay: BelowOne = 0.0
    """Decay per step of an exponential moving average of the weights, which is validated and saved; 0 for none."""
    z_loss: Annotated[float, Bounds(ge=0, le=MOST_FACTOR)] = 0.0
    """Factor of the mean squared log of the softmax's normaliser, added to the loss (arXiv 2204.02311); 0 for none."""
    trainable: tuple[str, ...] = ()
    """Patterns of the names of the parameters to train, such as blocks.*.attention.normaliser.tau; the others keep
    their values of init_from. Empty to train all."""
    distillation: Distillation = field(default_factory=NoDistillation)
    """A term of the loss that compares with the model of init_from as it was."""

    def __post_init__(self) -> None:
        fix = f"must be below train.steps={self.steps}"
        require(self.warmup_steps < self.steps, "train.warmup_steps", self.warmup_steps, fix)
        for name, part, used in (
            ("betas", "optimiser", self.optimiser.adaptive),
            ("final_lr_fraction", "schedule", self.schedule.falls),
        ):
            chosen, default = type(getattr(self, part)).__name__, getattr(TrainConfig, name)
            fix = f"has no effect with train.{part}={chosen}; leave it at {default}"
            require(used or getattr(self, name) == default, f"train.{name}", getattr(self, name), fix)


@dataclass(frozen=True)
class RunConfig(CheckedFields, prefix=""):
    """One training: model x data x trainer, and the seed of weights and batch order."""

    data: DataConfig
    """Training and validation data."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The training."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights and of the batch order."""
    init_from: str | None = None
    """Checkpoint whose weights initialise the model where name, shape and class of the part match; None for none."""
    evaluations: tuple[Evaluation, ...] = ()
    """Measurements of the final model in addition to the usual metrics."""
    diagnosed_sequences: PositiveInt = 64
    """Evenly spaced validation sequences on which attention is diagnosed, at most, before and after training."""

    def __post_init__(self) -> None:
        for number, evaluation in enumerate(self.evaluations):
            is_new = evaluation not in self.evaluations[:number]
            require(is_new, "evaluations", evaluation, "is given twice; leave one out")
