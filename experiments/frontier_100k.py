"""The smallest size of a ladder: 100 thousand parameters without the embedding, 20 tokens of Python for each.

The other sizes are `frontier_300k` to `frontier_30m`, by one recipe: AdamW (0.9, 0.95), warm-up over a tenth of the
steps, a cosine to a tenth of the rate, decay 0.1, RMSNorm, SwiGLU, RoPE, tied embeddings, 4,096 tokens. The rate is
each rule's best of `ablations/frontier_rates.py`. `--data.path=TEXT --data.tokenizer=FILE` trains on other text.
"""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.packages import Packages

TOKENS_PER_PARAMETER = 20


def make_size(
    width: int, layers: int, heads: int, hidden: int, context: int, batch: int, rate: float, precision: str = "fp32"
) -> RunConfig:
    """The recipe at one size. batch: sequences of a step."""
    model = ModelConfig(d_model=width, n_layers=layers, n_heads=heads, d_ff=hidden, position=Rope())
    parameters = layers * width * (4 * width + 3 * hidden)
    steps = round(TOKENS_PER_PARAMETER * parameters / (batch * context))
    return RunConfig(
        data=Packages(context_length=context, validation_windows=2**17 // context),
        model=model,
        train=TrainConfig(
            steps=steps,
            batch_size=batch,
            lr=rate,
            warmup_steps=steps // 10,
            weight_decay=0.1,
            precision=precision,  # type: ignore[arg-type]
            val_every=-(-steps // 4),
            checkpoint_every=-(-steps // 4),
        ),
        diagnosed_sequences=32,
    )


def config() -> RunConfig:
    return make_size(width=64, layers=2, heads=4, hidden=176, context=256, batch=16, rate=5e-3)
