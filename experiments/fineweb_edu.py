"""A small byte-level model on 50 million streamed tokens of FineWeb-Edu's 10BT sample: needs the network once.

Penedo et al. 2024, "The FineWeb Datasets: Decanting the Web for the Finest Text Data at Scale" (arXiv 2406.17557).
"""

from lit_lazy.attention import Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.text import Text


def config() -> RunConfig:
    return RunConfig(
        data=Text(
            hub="HuggingFaceFW/fineweb-edu",
            hub_config="sample-10BT",
            stream=True,
            max_tokens=50_000_000,
            validation_share=0.01,
            context_length=512,
            validation_windows=256,
        ),
        model=ModelConfig(d_model=256, n_layers=4, n_heads=8, d_ff=704, position=Rope(), tie_embeddings=False),
        train=TrainConfig(steps=5_000, batch_size=16, lr=1e-3, warmup_steps=200, val_every=500, checkpoint_every=500),
    )
