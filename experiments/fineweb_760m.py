"""760M parameters on FineWeb-Edu: our size, with the recipe of `fineweb_340m`.

The authors have no public file for their 760M model. Width 1536, 24 layers, 16 heads and a SwiGLU of 4096 are ours and
give 778M parameters. The comparable tables (Titans, arXiv 2501.00663) use 30 billion tokens: 61,440 steps, three times
sample-10BT, so this takes the first 32 billion of sample-100BT. Everything else, including the sources, is as there.
"""

from lit_lazy.config import RunConfig, experiment


def config() -> RunConfig:
    return experiment(
        "fineweb_340m",
        {
            "data.hub_config": "sample-100BT",
            "data.max_tokens": 32_212_254_720,
            "model.d_model": 1536,
            "model.d_ff": 4096,
            "train.steps": 61_440,
        },
    )
