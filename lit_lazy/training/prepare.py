"""What is checked of a run before anything is created."""

import torch

from flash_lazy import resolve_backend
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.data import DataSource
from lit_lazy.support.checks import require
from lit_lazy.training.devices import training_device


def check_model(cfg: ModelConfig, context_length: int) -> None:
    """Raise ValueError where a part of the model cannot serve a context of this length, or this machine its backend."""
    cfg.position.build(cfg.d_model, cfg.d_model // cfg.n_heads, context_length)
    cfg.attention.normaliser.build(cfg.n_heads, context_length)
    cfg.attention.bias.build(cfg.n_heads, context_length)(context_length)
    try:
        resolve_backend(cfg.backend, torch.empty(0, cfg.d_model // cfg.n_heads, device=training_device()))
    except ValueError as error:
        raise ValueError(f"model.backend={cfg.backend!r}: {error}") from None


def prepare(cfg: RunConfig) -> DataSource:
    """Load a run's data and check that data, model and training fit each other, before anything is created.

    Raises ValueError in one line that names the option.
    """
    source = cfg.data.load()
    require(
        cfg.train.batch_size <= len(source.train),
        "train.batch_size",
        cfg.train.batch_size,
        f"must not exceed the {len(source.train)} training sequences",
    )
    check_model(cfg.model, source.context_length)
    return source
