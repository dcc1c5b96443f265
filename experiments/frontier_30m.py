"""Thirty million parameters without the embedding, 20 tokens for each, for a GPU; the recipe of `frontier_100k`."""

from frontier_100k import make_size

from lit_lazy.config import RunConfig


def config() -> RunConfig:
    return make_size(width=512, layers=9, heads=8, hidden=1_408, context=512, batch=256, rate=1e-3, precision="bf16")
