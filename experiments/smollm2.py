"""SmolLM2-135M, continued on the source of Python's library, 15 minutes a training. After `make smollm2`."""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.stdlib_text import StdlibText


def config() -> RunConfig:
    return RunConfig(
        data=StdlibText(tokenizer="models/tokenizer.json", context_length=256, validation_windows=24),
        model=ModelConfig(
            d_model=576, n_layers=30, n_heads=9, n_kv_heads=3, d_ff=1536, norm_eps=1e-5, position=Rope(base=1e5)
        ),
        train=TrainConfig(
            steps=64, batch_size=4, lr=1e-4, warmup_steps=8, val_every=32, checkpoint_every=16, log_every=8
        ),
        init_from="models/smollm2.ckpt",
        # A pass through all windows takes a core 18 seconds, and the diagnosis makes seven.
        diagnosed_sequences=8,
    )
