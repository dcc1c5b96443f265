"""Bigram-Backcopy in two seconds a training: softmax learns it with a sink, Elastic-Softmax without."""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.backcopy import Backcopy


def config() -> RunConfig:
    return RunConfig(
        data=Backcopy(vocab_size=32, context_length=32, n_triggers=3, train_sequences=8_000, validation_sequences=256),
        model=ModelConfig(d_model=32, n_layers=1, n_heads=1, d_ff=64, position=Rope(), tie_embeddings=False),
        train=TrainConfig(steps=250, batch_size=32, lr=1e-2, warmup_steps=20, val_every=50, checkpoint_every=125),
    )
