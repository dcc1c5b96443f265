"""A few steps of the recipe of `frontier_100k` on Python's standard library: runs the full path in seconds."""

from dataclasses import replace

from frontier_100k import make_size

from lit_lazy.config import RunConfig
from lit_lazy.data.stdlib_text import StdlibText


def config() -> RunConfig:
    made = make_size(width=16, layers=1, heads=2, hidden=32, context=256, batch=4, rate=4e-3)
    return replace(
        made,
        data=StdlibText(context_length=256, max_tokens=100_000, validation_windows=8, validation_overlap=True),
        train=replace(made.train, steps=12, warmup_steps=4, val_every=6, checkpoint_every=6, log_every=2),
        diagnosed_sequences=4,
    )
