"""What every data source offers: a config that loads, and the sequences it loads."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    import numpy as np

    from lit_lazy.data.tokeniser import Tokenizer

Batch = dict[str, Tensor]


class DataConfig(ABC):
    """A data source's options. Leaves are frozen dataclasses; a field's docstring is its help on the command line."""

    @abstractmethod
    def load(self) -> "DataSource":
        """The source's sequences, built once per process: equal configs give the same object."""

    def load_tokenizer(self) -> "Tokenizer | None":
        """What turns text into its tokens and back, without loading the text; None where tokens stand for no text."""
        return None


class TokenDataset(Dataset[Batch]):
    """Next-token sequences, with what is known about each of their positions.

    `sequences` is an integer `[N, L + 1]` of any width; an item is `tokens` (all but the last) and `targets` (all but
    the first), int64 `[L]`, together with the item's row of every tensor `[N, L]` in `positions`.
    `__getitems__` gives the whole batch, `[B, L]`, at once: use a DataLoader with an identity `collate_fn`.
    """

    def __init__(self, sequences: Tensor, positions: Batch | None = None):
        self.sequences = sequences
        self.positions = positions or {}

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Batch:
        return self._batch(index)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self._batch(indices)

    def _batch(self, index: int | list[int]) -> Batch:
        sequences = self.sequences[index].long()
        known = {name: values[index] for name, values in self.positions.items()}
        return {"tokens": sequences[..., :-1].contiguous(), "targets": sequences[..., 1:].contiguous(), **known}


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
    """Names of the batch's bool `[B, L]` masks that sort the query rows into groups worth measuring apart."""


def fingerprint(parts: "Sequence[np.ndarray]") -> str:
    """16 hex digits over the parts' types, shapes and values, and where one ends and the next begins."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.dtype.str}{part.shape}".encode())
        digest.update(part.tobytes())
    return digest.hexdigest()[:16]
