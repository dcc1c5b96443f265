"""Trigger-conditional averaging, half a minute a training: one head, no positions, a narrow MLP (docs/method.md, 8)."""

from lit_lazy.attention import NoPosition
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.trigger import Trigger


def config() -> RunConfig:
    return RunConfig(
        data=Trigger(symbols=32, context_length=32, train_sequences=76_800, validation_sequences=1_024),
        model=ModelConfig(d_model=64, n_layers=1, n_heads=1, d_ff=16, position=NoPosition(), tie_embeddings=False),
        train=TrainConfig(steps=1_200, batch_size=64, lr=3e-3, warmup_steps=50),
    )
