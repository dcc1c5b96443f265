"""A few steps of a tiny model of SmolLM2's form on bytes of the standard library; give it weights by `--init-from`."""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.stdlib_text import StdlibText


def config() -> RunConfig:
    return RunConfig(
        data=StdlibText(context_length=32, max_tokens=4_096, validation_windows=8),
        model=ModelConfig(
            d_model=24, n_layers=2, n_heads=3, n_kv_heads=1, d_ff=32, norm_eps=1e-5, position=Rope(base=1e5)
        ),
        train=TrainConfig(steps=6, batch_size=4, lr=1e-3, warmup_steps=2, val_every=3, checkpoint_every=3, log_every=2),
    )
