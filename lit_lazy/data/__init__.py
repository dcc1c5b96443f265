"""Data sources: each file holds one frozen config whose `load()` returns the sequences of a run.

This package gives only their shared interface, which needs nothing but torch, and what the facts about a source, its
`DataSource.info`, say of the losses on it; the sources need more.
"""

import math
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_lazy.data.source_interface import DataConfig, DataSource, SpecialTokens, fingerprint
    from lit_lazy.data.token_dataset import IGNORED, Batch, TokenDataset

__all__ = ["IGNORED", "Batch", "DataConfig", "DataSource", "SpecialTokens", "TokenDataset", "fingerprint"]

MOST_PASSES = 16
"""Passes through a text of which further ones teach nothing new (Muennighoff et al., arXiv 2305.16264)."""


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is (PEP 562), as the functions on facts need no torch."""
    if name in __all__:
        module = "token_dataset" if name in ("IGNORED", "Batch", "TokenDataset") else "source_interface"
        return getattr(import_module(f"lit_lazy.data.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def compute_learned_nats(info: Mapping[str, str | int | float]) -> float | None:
    """Validation loss, in nats per target, below which a model has learned a source with this info.

    Halfway between `chance_nats`, the loss of the best predictor without attention, and `optimum_nats`; for text
    between the byte unigram and the byte trigram. None for a source without these marks.
    """
    if {"optimum_nats", "chance_nats"} <= info.keys():
        return (float(info["optimum_nats"]) + float(info["chance_nats"])) / 2
    if {"unigram_bits_per_byte", "trigram_bits_per_byte"} <= info.keys():
        bits = (float(info["unigram_bits_per_byte"]) + float(info["trigram_bits_per_byte"])) / 2
        return bits * math.log(2) * float(info["bytes_per_token"])
    return None


def describe_repetition(info: Mapping[str, str | int | float], tokens: int) -> str:
    """Says that a training on so many tokens repeats its text too often; "" if it does not, and of other data."""
    is_text = {"bytes_per_token", "train_tokens"} <= info.keys()
    passes = tokens / int(info["train_tokens"]) if is_text else 0.0
    if passes < MOST_PASSES:
        return ""
    return (
        f"{passes:,.0f} passes through the text: a model learns it by heart, and its validation loss rises; give more "
        "text, or fewer train.steps"
    )


def list_doubts(info: Mapping[str, str | int | float]) -> list[str]:
    """What makes validation losses on data with these facts doubtful, a line each."""
    shared, lossy = float(info.get("validation_overlap", 0)), float(info.get("lossy_documents", 0))
    doubts = {
        f"{shared:.1%} of the validation documents are in the training text too": shared,
        f"bits per byte are too low: the tokens do not restore {lossy:.1%} of a sample of documents": lossy,
    }
    return [line for line, share in doubts.items() if share]
