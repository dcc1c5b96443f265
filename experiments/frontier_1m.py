"""A million parameters without the embedding, 20 tokens of Python for each; the recipe of `frontier_100k`."""

from frontier_100k import make_size

from lit_lazy.config import RunConfig


def config() -> RunConfig:
    return make_size(width=128, layers=5, heads=4, hidden=352, context=512, batch=32, rate=3e-3)
