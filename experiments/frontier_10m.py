"""Ten million parameters without the embedding, 20 tokens for each, for a GPU; the recipe of `frontier_100k`."""

from frontier_100k import make_size

from lit_lazy.config import RunConfig


def config() -> RunConfig:
    return make_size(width=384, layers=6, heads=6, hidden=1_056, context=512, batch=128, rate=1e-3, precision="bf16")
