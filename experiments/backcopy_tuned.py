"""Bigram-Backcopy at softmax's best learning rate of rivals_rates, in half the steps of `backcopy`."""

from dataclasses import replace

from backcopy import config as original

from lit_lazy.config import RunConfig


def config() -> RunConfig:
    base = original()
    return replace(
        base,
        data=replace(base.data, train_sequences=19_200),
        train=replace(base.train, steps=600, lr=1e-2),
    )
