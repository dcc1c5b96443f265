"""Three million parameters without the embedding, 20 tokens for each, for a GPU; the recipe of `frontier_100k`."""

from frontier_100k import make_size

from lit_lazy.config import RunConfig


def config() -> RunConfig:
    return make_size(width=256, layers=4, heads=4, hidden=704, context=512, batch=64, rate=2e-3, precision="bf16")
