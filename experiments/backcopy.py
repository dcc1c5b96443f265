"""Bigram-Backcopy with the smallest model that forms an attention sink: one layer, one head (docs/method.md)."""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.backcopy import Backcopy


def config() -> RunConfig:
    return RunConfig(
        data=Backcopy(
            vocab_size=64, context_length=64, n_triggers=3, train_sequences=38_400, validation_sequences=1_024
        ),
        model=ModelConfig(d_model=64, n_layers=1, n_heads=1, d_ff=128, position=Rope(), tie_embeddings=False),
        train=TrainConfig(steps=1_200, batch_size=32, lr=3e-3, warmup_steps=50),
    )
