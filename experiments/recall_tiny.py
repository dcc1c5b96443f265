"""A few steps of recall with absent keys and a small model: runs the full path in seconds; results mean nothing."""

from lit_lazy.attention import NoPosition
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.recall import Recall


def config() -> RunConfig:
    return RunConfig(
        data=Recall(pairs=6, queries=4, keys=72, values=2, train_sequences=256, validation_sequences=32),
        model=ModelConfig(d_model=16, n_layers=1, n_heads=1, d_ff=32, position=NoPosition()),
        train=TrainConfig(steps=6, batch_size=8, warmup_steps=2, val_every=3, checkpoint_every=3, log_every=2),
    )
