"""What is read of a published model, whatever its format: settings, weights and tokeniser."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor


class Weight(NamedTuple):
    """A tensor in a file.

    blocks: reads it in consecutive parts along the first dimension, of any floating-point type, so that a large one is
    never in memory as a whole.
    """

    shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Tensor]]


@dataclass(frozen=True)
class PublishedModel:
    """A published model; nothing of it is executed."""

    config: Mapping[str, Any]
    """Content of its config.json, by the names of transformers."""
    weights: Mapping[str, Weight]
    """By this project's names; those that it does not know keep their own."""
    tokenizer: str
    """JSON of the tokenizers library."""


def make_pickle_error(file: Path) -> ValueError:
    return ValueError(f"{file.name}: is a pickle, which could run code, so it is not read; convert it to safetensors")


def rename(name: str, layers: str, parts: Mapping[str, str]) -> str:
    """This project's name of a tensor such as `<layers>.3.<part>.weight` or `<part>.weight`; an unknown one is kept."""
    stem, _, kind = name.rpartition(".")
    index, _, part = stem.removeprefix(f"{layers}.").partition(".")
    in_layer = stem.startswith(f"{layers}.") and index.isdecimal()
    known = parts.get(part if in_layer else stem)
    if known is None:
        return name
    return f"blocks.{index}.{known}.{kind}" if in_layer else f"{known}.{kind}"
