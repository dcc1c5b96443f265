"""Ten million parameters in an hour on two cores: text, tokens, model and weights, as in docs/scale.md."""

from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias, Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.text import Text


def config() -> RunConfig:
    return RunConfig(
        data=Text(
            path="runs/corpus/*.jsonl", tokenizer="runs/corpus/bpe.json", context_length=256, validation_windows=64
        ),
        model=ModelConfig(
            d_model=256,
            n_layers=10,
            n_heads=4,
            d_ff=704,
            attention=AttentionSpec(Elastic(), LearnedBias()),
            position=Rope(),
        ),
        train=TrainConfig(steps=800, batch_size=16, lr=1e-3, warmup_steps=80, val_every=200, checkpoint_every=100),
    )
