"""A few steps of trigger-conditional averaging with a small model: the full path in seconds; results mean nothing."""

from lit_lazy.attention import NoPosition
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.trigger import Trigger


def config() -> RunConfig:
    return RunConfig(
        data=Trigger(symbols=8, context_length=16, train_sequences=256, validation_sequences=32),
        model=ModelConfig(d_model=16, n_layers=1, n_heads=1, d_ff=16, position=NoPosition()),
        train=TrainConfig(steps=6, batch_size=8, warmup_steps=2, val_every=3, checkpoint_every=3, log_every=2),
    )
