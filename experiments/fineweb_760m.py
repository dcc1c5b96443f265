"""760M parameters on FineWeb-Edu: our own size, with the recipe of `fineweb_340m`.

There is no public file of the authors for their 760M; width 1536, 24 layers, 16 heads and a SwiGLU of 4096 are ours:
778M parameters. The tables it belongs beside (Titans, arXiv 2501.00663) see 30 billion tokens: 61,440 steps, three
times what sample-10BT holds, hence the first 32 billion of sample-100BT. All else, sources included, is as there.
"""

from lit_lazy.config import RunConfig
from lit_lazy.config.files import experiment
from lit_lazy.config.serialisation import replace_at


def config() -> RunConfig:
    return replace_at(
        experiment("fineweb_340m"),
        {
            "data.hub_config": "sample-100BT",
            "data.max_tokens": 32_212_254_720,
            "model.d_model": 1536,
            "model.d_ff": 4096,
            "train.steps": 61_440,
        },
    )
