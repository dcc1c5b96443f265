"""Recall with absent keys, half a minute a training: where a query looks if its key is missing (docs/method.md, 8)."""

from lit_lazy.attention import NoPosition
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.recall import Recall


def config() -> RunConfig:
    """No positions, so longer evaluations differ only in their number of pairs."""
    return RunConfig(
        data=Recall(pairs=8, queries=16, keys=72, values=4, train_sequences=38_400, validation_sequences=1_024),
        model=ModelConfig(d_model=64, n_layers=1, n_heads=4, d_ff=128, position=NoPosition(), tie_embeddings=False),
        train=TrainConfig(steps=1_200, batch_size=32, lr=3e-3, warmup_steps=50),
    )
