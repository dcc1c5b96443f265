"""A few steps of distractors with a small model: runs the full path in seconds; results mean nothing."""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.distractors import Distractors


def config() -> RunConfig:
    return RunConfig(
        data=Distractors(queries=4, lags=3, keys=6, values=2, train_sequences=256, validation_sequences=32),
        model=ModelConfig(d_model=16, n_layers=1, n_heads=4, d_ff=32, position=Rope()),
        train=TrainConfig(steps=6, batch_size=8, warmup_steps=2, val_every=3, checkpoint_every=3, log_every=2),
    )
