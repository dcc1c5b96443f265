"""300 thousand parameters without the embedding, 20 tokens of Python for each; the recipe of `frontier_100k`."""

from frontier_100k import make_size

from lit_lazy.config import RunConfig


def config() -> RunConfig:
    return make_size(width=96, layers=3, heads=3, hidden=256, context=256, batch=32, rate=4e-3)
