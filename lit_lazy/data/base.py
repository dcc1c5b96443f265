"""What every data source offers: a config that loads, and the sequences it loads."""

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    import numpy as np

    from lit_lazy.data.pipeline.tokeniser import Tokenizer

Batch = dict[str, Tensor]
IGNORED = -100
"""A target where nothing is to be predicted: it counts in no loss."""


@dataclass(frozen=True)
class Outline:
    """What is known of a source's sequences without making them."""

    name: str
    vocab_size: int
    context_length: int
    sequences: int | None
    """To train on; None where nobody has counted them yet."""
    document_mask: bool = False
    """Whether attention is kept within documents."""


class DataConfig(ABC):
    """A data source's options. Leaves are frozen dataclasses; a field's docstring is its help on the command line."""

    @abstractmethod
    def load(self) -> "DataSource":
        """The source's sequences, built once per process: equal configs give the same object."""

    def outline(self) -> Outline:
        """What a plan has to know; what costs much to make is not made for it."""
        return self.load().outline

    def at_length(self, length: int) -> "DataConfig":
        """The same data in sequences of another length, to measure with. Raises ValueError where there are none."""
        fields = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        if "context_length" not in fields:
            raise ValueError(f"{type(self).__name__} has no context_length to change; leave other lengths out")
        # Generated data make as many training sequences as they are told, and none is looked at.
        fewest = {name: 1 for name in ("train_sequences",) if name in fields}
        return dataclasses.replace(self, context_length=length, **fewest)  # type: ignore[type-var]

    def tokenise(self, processes: int | None = None) -> Path | None:  # noqa: ARG002
        """The folder that keeps its tokens, made where it is missing; None for sources that keep none.

        processes: how many tokenise files side by side; None for as many as the files are worth.
        """
        return None

    def load_tokenizer(self) -> "Tokenizer | None":
        """What turns text into its tokens and back, without loading the text; None where tokens stand for no text."""
        return None


class TokenDataset(Dataset[Batch]):
    """Next-token sequences, with what is known about each of their positions.

    `sequences` is an integer `[N, L + 1]` of any width; an item is `tokens` (all but the last) and `targets` (all but
    the first), int64 `[L]`, together with the item's row of every tensor `[N, L]` in `positions`.
    `__getitems__` gives the whole batch, `[B, L]`, at once: use a DataLoader with an identity `collate_fn`.
    """

    def __init__(self, sequences: Tensor, positions: Batch | None = None, targets: Tensor | None = None):
        """targets: integer `[N, L]`, what is to be predicted in place of the next tokens, or `IGNORED`.

        As many in each sequence are not ignored, so that the mean of parts of a batch is that of the batch.
        """
        self.sequences = sequences
        self.positions = positions or {}
        self.targets = targets

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Batch:
        return self._batch(index)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self._batch(indices)

    def _batch(self, index: int | list[int]) -> Batch:
        sequences = self.sequences[index].long()
        targets = sequences[..., 1:] if self.targets is None else self.targets[index].long()
        known = {name: values[index] for name, values in self.positions.items()}
        return {"tokens": sequences[..., :-1].contiguous(), "targets": targets.contiguous(), **known}


class DocumentDataset(TokenDataset):
    """Windows of documents laid end to end, with `place` in each item: where its tokens stand in their documents.

    `place` is int64 `[L]`, from 0, counted from the document's first token that is in the window.
    """

    def __init__(self, sequences: Tensor, starts: "np.ndarray", ends: "np.ndarray") -> None:
        """starts `[N]`: where each window begins in the text; ends `[documents]`: where each document ends."""
        super().__init__(sequences)
        self.starts, self.ends = starts, ends

    def _batch(self, index: int | list[int]) -> Batch:
        batch = super()._batch(index)
        starts, length = self.starts[index], self.sequences.shape[1] - 1
        places = torch.stack([self._places(start, length) for start in starts.reshape(-1)])
        return batch | {"place": places.view(batch["tokens"].shape)}

    def _places(self, start: int, length: int) -> Tensor:
        first, last = self.ends.searchsorted([start, start + length - 1], side="right")
        begins = torch.from_numpy(self.ends[first:last] - start)
        own = torch.zeros(length, dtype=torch.int64)
        own[begins] = begins
        return torch.arange(length) - own.cummax(0).values


@dataclass(frozen=True)
class DataSource:
    """The loaded sequences of a run, and the facts about them that are logged with it."""

    name: str
    vocab_size: int
    """Number of token ids, special ones included: what the model's embedding needs."""
    context_length: int
    """L: the number of tokens, and of targets, in a sequence."""
    fingerprint: str
    """Digest of the training and validation content that is really used; part of a run's key."""
    info: dict[str, str | int | float]
    """Sizes, versions, oracle and baseline figures."""
    train: TokenDataset
    validation: TokenDataset
    row_groups: tuple[str, ...] = ()
    """Names of the batch's bool `[B, L]` masks that sort the query rows into groups worth measuring apart.

    Of rows whose target is not ignored, where the data know their oracle.
    """
    row_contrast: tuple[str, str] | None = None
    """Two of these groups whose masses are worth a difference."""
    watched_key: int | None = None
    """Position, from 1, of a key whose weight is worth measuring beside the first one's."""

    @property
    def outline(self) -> Outline:
        """What a plan has to know."""
        masked = "place" in self.train.__getitems__([0])
        return Outline(self.name, self.vocab_size, self.context_length, len(self.train), masked)


def fingerprint(parts: "Sequence[np.ndarray]") -> str:
    """16 hex digits over the parts' types, shapes and values, and where one ends and the next begins."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.dtype.str}{part.shape}".encode())
        digest.update(part.tobytes())
    return digest.hexdigest()[:16]
