"""A few steps of the recipe of `frontier_100k` on Python's standard library: runs the full path in seconds."""

from dataclasses import replace

from frontier_100k import make_size

from lit_lazy.config import RunConfig
from lit_lazy.data.stdlib_text import StdlibText


def config() -> RunConfig:
    made = make_size(width=16, layers=1, heads=2, hidden=32, context=32, batch=8, rate=5e-3)
    return replace(
        made,
        data=StdlibText(context_length=32, max_tokens=100_000, validation_windows=16),
        train=replace(made.train, steps=6, warmup_steps=2, val_every=3, checkpoint_every=3, log_every=2),
        diagnosed_sequences=4,
    )
