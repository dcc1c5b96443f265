"""What the facts about a data source, its `DataSource.info`, say of the losses on it."""

import math
from collections.abc import Mapping


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


def list_doubts(info: Mapping[str, str | int | float]) -> list[str]:
    """What makes validation losses on data with these facts doubtful, a line each."""
    shared, lossy = float(info.get("validation_overlap", 0)), float(info.get("lossy_documents", 0))
    doubts = {
        f"{shared:.1%} of the validation documents are in the training text too": shared,
        f"bits per byte are too low: the tokens do not restore {lossy:.1%} of a sample of documents": lossy,
    }
    return [line for line, share in doubts.items() if share]
