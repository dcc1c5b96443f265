"""A few steps of Bigram-Backcopy with a small model: runs the full path in seconds; results mean nothing."""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.backcopy import Backcopy


def config() -> RunConfig:
    return RunConfig(
        data=Backcopy(vocab_size=16, context_length=16, train_sequences=256, validation_sequences=32),
        model=ModelConfig(d_model=16, n_layers=1, n_heads=1, d_ff=32, position=Rope()),
        train=TrainConfig(steps=6, batch_size=8, warmup_steps=2, val_every=3, checkpoint_every=3, log_every=2),
    )
