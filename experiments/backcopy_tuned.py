"""Bigram-Backcopy at softmax's best learning rate of rivals_rates, in half the steps of `backcopy`."""

from lit_lazy.config import RunConfig, experiment


def config() -> RunConfig:
    return experiment("backcopy", {"data.train_sequences": 19_200, "train.steps": 600, "train.lr": 1e-2})
