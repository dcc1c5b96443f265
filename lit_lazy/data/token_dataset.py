"""Sequences of tokens as a dataset of batches, with facts about each position and with documents."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_lazy.support.checked_fields import require

if TYPE_CHECKING:
    import numpy as np


Batch = dict[str, Tensor]


IGNORED = -100
"""Target value excluded from every loss."""
OWN_NAMES = ("tokens", "targets")
"""What a batch has beside the facts about its positions."""
SEQUENCES_AT_ONCE = 1024
"""Sequences that are checked at a time."""


class TokenDataset(Dataset[Batch]):
    """Next-token sequences with facts about each position.

    `sequences` is an integer tensor `[N, L + 1]` of any width. An item holds `tokens` (all but the last) and `targets`
    (all but the first), int64 `[L]`, and the item's row of every tensor `[N, L]` in `positions`.
    `__getitems__` returns a complete batch `[B, L]`: use a DataLoader with an identity `collate_fn`.
    """

    def __init__(
        self,
        sequences: Tensor,
        positions: Batch | None = None,
        targets: Tensor | None = None,
        check: Callable[[int | list[int]], object] | None = None,
    ):
        """All may be arrays too. targets: integer `[N, L]`, predicted instead of the next tokens; `IGNORED` for no
        prediction.

        Every sequence must have the same number of predicted targets, so that the mean loss over the parts of a batch
        equals that of the batch.
        check: called with the indices of sequences before they are read.
        """
        self.sequences = torch.as_tensor(sequences)
        self.positions = {name: torch.as_tensor(values) for name, values in (positions or {}).items()}
        self.targets = None if targets is None else torch.as_tensor(targets)
        self.check = check

    def check_contents(self, name: str, vocab_size: int, context_length: int) -> None:
        """Raise a one-line ValueError, which begins with a name, unless a model of these sizes can learn from it."""
        tokens, shape = self.sequences, [len(self), context_length]
        widths = {name: (tokens, context_length + 1)}
        if self.targets is not None:
            widths[f"{name}: targets"] = self.targets, context_length
        for what, (x, width) in widths.items():
            fits = list(x.shape) == [len(self), width] and not x.is_floating_point()
            require(fits, what, f"{x.dtype} {list(x.shape)}", f"must be whole numbers of shape {[len(self), width]}")
        taken = [name for name in OWN_NAMES if name in self.positions]
        require(not taken, f"{name}: positions", taken, "would replace the batch's own; rename them")
        for what, x in self.positions.items():
            require(list(x.shape) == shape, f"{name}: positions[{what!r}]", list(x.shape), f"must be of shape {shape}")
        if (place := self.positions.get("place")) is not None:
            rises = (place[:, 1:] == 0) | (place[:, 1:] == place[:, :-1] + 1)
            right = place.dtype == torch.int64 and not place[:, 0].any() and bool(rises.all())
            fix = "must be int64 that begins at 0 and rises by 1, or returns to 0 where a document begins"
            require(right, f"{name}: positions['place']", place.dtype, fix)
        require(len(tokens) > 0, name, list(tokens.shape), "must hold at least one sequence")
        # What has a check of its own is of a cache on the disk, whose digests vouch for it, and may exceed the memory.
        ranges = [block.long().aminmax() for block in tokens.split(SEQUENCES_AT_ONCE)[: 1 if self.check else None]]
        least, most = min(int(found.min) for found in ranges), max(int(found.max) for found in ranges)
        require(least >= 0 and most < vocab_size, name, [least, most], f"tokens must be 0 to {vocab_size - 1}")
        if self.targets is None:
            return
        name, invalid, numbers = f"{name}: targets", set[int](), set[int]()
        for block in map(Tensor.long, self.targets.split(SEQUENCES_AT_ONCE)):
            given = block != IGNORED
            invalid |= {*block[given & ((block < 0) | (block >= vocab_size))].tolist()}
            numbers |= {*given.sum(1).tolist()}
        fix = f"must be 0 to {vocab_size - 1}, or {IGNORED} where nothing is predicted"
        require(not invalid, name, sorted(invalid), fix)
        fix = "every sequence must have the same number, at least 1"
        require(min(numbers) > 0 and len(numbers) == 1, name, sorted(numbers), fix)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Batch:
        return self._batch(index)

    def __getitems__(self, indices: list[int]) -> Batch:
        return self._batch(indices)

    def _batch(self, index: int | list[int]) -> Batch:
        if self.check:
            self.check(index)
        sequences = self.sequences[index].long()
        targets = sequences[..., 1:] if self.targets is None else self.targets[index].long()
        positions = {name: values[index] for name, values in self.positions.items()}
        return {"tokens": sequences[..., :-1].contiguous(), "targets": targets.contiguous(), **positions}


class DocumentDataset(TokenDataset):
    """Windows of concatenated documents; each item has `place`, the positions of its tokens in their documents.

    `place` is int64 `[L]`, counted from 0 at the document's first token inside the window.
    """

    def __init__(
        self,
        sequences: Tensor,
        starts: "np.ndarray",
        ends: "np.ndarray",
        check: Callable[[int | list[int]], object] | None = None,
    ) -> None:
        """starts `[N]`: offset of each window in the text; ends `[documents]`: offset of each document's end.

        check: as for `TokenDataset`.
        """
        super().__init__(sequences, check=check)
        self.starts, self.ends = starts, ends

    def _batch(self, index: int | list[int]) -> Batch:
        batch = super()._batch(index)
        starts, length = self.starts[index], self.sequences.shape[1] - 1
        places = torch.stack([self._places(start, length) for start in starts.reshape(-1)])
        return batch | {"place": places.view(batch["tokens"].shape)}

    def _places(self, start: int, length: int) -> Tensor:
        first, last = self.ends.searchsorted([start, start + length - 1], side="right")
        begins = torch.from_numpy(self.ends[first:last] - start)
        document_start = torch.zeros(length, dtype=torch.int64)
        document_start[begins] = begins
        return torch.arange(length) - document_start.cummax(0).values
