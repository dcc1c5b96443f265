"""A few steps on the questions' long text with a small model: runs the full path in seconds; results mean nothing."""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.stdlib import Stdlib


def config() -> RunConfig:
    return RunConfig(
        data=Stdlib(context_length=192, validation_windows=4, bos=True),
        model=ModelConfig(d_model=16, n_layers=1, n_heads=2, d_ff=32, position=Rope()),
        train=TrainConfig(steps=6, batch_size=2, warmup_steps=2, val_every=3, checkpoint_every=3, log_every=2),
    )
