"""The questions' text in sequences of 2,048 bytes, forty seconds a training: long enough for tiles to skip."""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.stdlib import Stdlib


def config() -> RunConfig:
    return RunConfig(
        data=Stdlib(context_length=2_048, validation_windows=8, bos=True),
        model=ModelConfig(d_model=64, n_layers=2, n_heads=4, d_ff=176, position=Rope(), tie_embeddings=False),
        train=TrainConfig(steps=600, batch_size=1, lr=5e-3, warmup_steps=60, val_every=300, checkpoint_every=300),
    )
