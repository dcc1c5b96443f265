"""A small byte-level model on the source code of Python's standard library: real text on every machine."""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.stdlib import Stdlib


def config() -> RunConfig:
    return RunConfig(
        data=Stdlib(context_length=256, validation_windows=256),
        model=ModelConfig(d_model=128, n_layers=2, n_heads=4, d_ff=352, position=Rope(), tie_embeddings=False),
        train=TrainConfig(steps=1_000, batch_size=8, lr=2e-3, warmup_steps=100, val_every=250, checkpoint_every=250),
    )
