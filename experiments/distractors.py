"""Recall by key and distance among distractors, nine seconds a training: one layer, four heads (docs/method.md, 8)."""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.distractors import Distractors


def config() -> RunConfig:
    return RunConfig(
        data=Distractors(queries=8, lags=4, keys=16, values=8, train_sequences=38_400, validation_sequences=1_024),
        model=ModelConfig(d_model=64, n_layers=1, n_heads=4, d_ff=128, position=Rope(), tie_embeddings=False),
        train=TrainConfig(steps=1_200, batch_size=32, lr=3e-3, warmup_steps=50),
    )
