"""What is checked of a run before anything is created."""

import traceback
from pathlib import Path

import torch

from lit_lazy.attention import Attention
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.data import DataSource
from lit_lazy.support.checks import require
from lit_lazy.support.errors import one_line
from lit_lazy.training.devices import training_device


def check_model(cfg: ModelConfig, context_length: int) -> None:
    """Raise ValueError where a part of the model cannot serve a context of this length, or this machine its backend."""
    shape = cfg.layer_shape(0, context_length)
    try:
        attention = Attention(cfg.attention, shape, cfg.backend)
        attention.normaliser.probe(shape.n_heads, shape.head_dim, torch.device("cpu"))
        for layer in range(1, cfg.n_layers):
            cfg.attention.normaliser.build(cfg.layer_shape(layer, context_length))
    except (TypeError, AttributeError, LookupError, RuntimeError, AssertionError) as error:
        # A slip in a class of the user's own, for whom the last line of theirs says more than a traceback.
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        raise ValueError(f"model.attention: {type(error).__name__} ({where}): {one_line(error)}") from error
    attention.bias(context_length)
    cfg.position.build(cfg.d_model, shape.head_dim // attention.normaliser.maps, context_length)
    try:
        attention.to(training_device()).backend_name  # noqa: B018 (raises)
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
