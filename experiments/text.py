"""A small byte-level model on your text: --data.path=FILE, a folder or a glob of .txt, .jsonl or .parquet files."""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.text import Text


def config() -> RunConfig:
    return RunConfig(
        data=Text(context_length=256, validation_windows=128),
        model=ModelConfig(d_model=128, n_layers=2, n_heads=4, d_ff=352, position=Rope(), tie_embeddings=False),
        train=TrainConfig(steps=1_000, batch_size=8, lr=2e-3, warmup_steps=100, val_every=250, checkpoint_every=250),
    )
