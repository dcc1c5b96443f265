"""Interface of the data sources: a config, and the sequences that it loads."""

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lit_lazy.support.checks import (
    Bounds,
    CheckedFields,
    NonEmptyText,
    PositiveFloat,
    PositiveInt,
    Share,
    check_value,
    require,
)
from lit_lazy.support.names_to_paths import is_metric_name

if TYPE_CHECKING:
    import numpy as np

    from lit_lazy.data.pipeline.tokeniser import Tokenizer

Batch = dict[str, Tensor]
IGNORED = -100
"""Target value excluded from every loss."""
CHECKED_SEQUENCES = 64
"""Sequences whose tokens are checked; a corpus may exceed the memory."""
FACTS = {
    **dict.fromkeys(("optimum_nats", "chance_nats", "unigram_bits_per_byte", "trigram_bits_per_byte"), float),
    **dict.fromkeys(("validation_overlap", "lossy_documents"), Share),
    "bytes_per_token": PositiveFloat,
    "train_tokens": PositiveInt,
}
"""What `DataSource.info` may hold that figures are computed from."""
SEQUENCES_AT_ONCE = 1024
"""Sequences whose targets are counted at a time."""


@dataclass(frozen=True)
class Outline:
    """Facts about a source's sequences that are known without generating them."""

    name: str
    vocab_size: int
    context_length: int
    sequences: int | None
    """Number of training sequences; None if not yet counted."""
    document_mask: bool = False
    """Whether attention is restricted to documents."""
    assumed: str = ""
    """What is assumed because a file is not on this machine."""


@dataclass(frozen=True)
class SpecialTokens(CheckedFields, prefix="data.special_tokens."):
    """Ids of the tokens with which an imported model's source begins, ends and pads a text."""

    begin: int | None = None
    """Token before a text; None for none."""
    ends: tuple[int, ...] = ()
    """Tokens at which a generated text ends; empty if it ends where the data's documents do."""
    pad: int | None = None
    """Token of padding; None for none."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(token for token in (self.begin, *self.ends, self.pad) if token is not None)


class DataConfig(CheckedFields, ABC, prefix="data."):
    """Options of a data source. Subclasses are frozen dataclasses; a field's docstring is its command-line help."""

    @abstractmethod
    def load(self) -> "DataSource":
        """Sequences of the source, built once per process: equal configs return the same object."""

    def outline(self) -> Outline:
        """Facts that a plan needs. Subclasses whose sequences are expensive to load override this."""
        return self.load().outline

    def outline_elsewhere(self) -> Outline:
        """`outline` for an estimate of a training on another machine, whose files may be missing here."""
        return self.outline()

    def at_length(self, length: int) -> "DataConfig":
        """The same data in sequences of another length, for measurements. Raises ValueError if the length is fixed."""
        fields = {field.name for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        if "context_length" not in fields:
            raise ValueError(f"{type(self).__name__} has no context_length to change; measure only at its own length")
        # Measurements read no training sequences, so synthetic tasks generate only one.
        fewest = {name: 1 for name in ("train_sequences",) if name in fields}
        return dataclasses.replace(self, context_length=length, **fewest)  # type: ignore[type-var]

    def tokenise(self, processes: int | None = None) -> Path | None:  # noqa: ARG002
        """Folder of the cached tokens, created if missing; None for sources without a cache.

        processes: number of parallel tokenising processes; None chooses it by the files' size.
        """
        return None

    def load_tokenizer(self) -> "Tokenizer | None":
        """Tokeniser of the source, without loading its text; None if its tokens do not represent text."""
        return None

    def hash_tokenizer(self) -> str | None:
        """Digest of the tokeniser's file; None for a source without such a file."""
        return None


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

    @cached_property
    def target_numbers(self) -> list[int]:
        """The numbers of predicted targets that sequences have: all the same, if `targets` are right."""
        if self.targets is None:
            return [self.sequences.shape[1] - 1]
        blocks = self.targets.split(SEQUENCES_AT_ONCE)
        return sorted({number for block in blocks for number in (block.long() != IGNORED).sum(1).tolist()})

    def check_contents(self, name: str, vocab_size: int, context_length: int) -> None:
        """Raise a one-line ValueError, which begins with a name, unless a model of these sizes can learn from it."""
        tokens, shape = self.sequences, [len(self), context_length]
        widths = {name: (tokens, context_length + 1)}
        if self.targets is not None:
            widths[f"{name}: targets"] = self.targets, context_length
        for what, (x, width) in widths.items():
            fits = list(x.shape) == [len(self), width] and not x.is_floating_point()
            require(fits, what, f"{x.dtype} {list(x.shape)}", f"must be whole numbers of shape {[len(self), width]}")
        for what, x in self.positions.items():
            require(list(x.shape) == shape, f"{name}: positions[{what!r}]", list(x.shape), f"must be of shape {shape}")
        require(len(tokens) > 0, name, list(tokens.shape), "must hold at least one sequence")
        least, most = (int(x) for x in tokens[:CHECKED_SEQUENCES].long().aminmax())
        require(least >= 0 and most < vocab_size, name, [least, most], f"tokens must be 0 to {vocab_size - 1}")
        if self.targets is None:
            return
        sample, name = self.targets[:CHECKED_SEQUENCES].long(), f"{name}: targets"
        invalid = sample[(sample != IGNORED) & ((sample < 0) | (sample >= vocab_size))].unique().tolist()
        require(not invalid, name, invalid, f"must be 0 to {vocab_size - 1}, or {IGNORED} where nothing is predicted")
        numbers = self.target_numbers
        fix = "every sequence must have the same number, at least 1"
        require(numbers[0] > 0 and len(numbers) == 1, name, numbers, fix)

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


@dataclass(frozen=True)
class DataSource:
    """Loaded sequences of a run, and the facts about them that the run logs."""

    name: NonEmptyText
    vocab_size: PositiveInt
    """Number of token ids, including special ones: the size of the model's embedding."""
    context_length: PositiveInt
    """L: number of tokens, and of targets, per sequence."""
    fingerprint: NonEmptyText
    """Digest of the training and validation content actually used; part of a run's key."""
    info: dict[str, str | int | float]
    """Sizes, versions, and the losses of known predictors on the validation targets, as for `compute_learned_nats`."""
    train: TokenDataset
    validation: TokenDataset
    row_groups: tuple[str, ...] = ()
    """Names of the batch's bool `[B, L]` masks of query rows that are measured separately.

    If the batch has `oracle_nll`, they select only rows whose target is not ignored.
    """
    row_contrast: tuple[str, str] | None = None
    """Two of these groups; the difference of their attention mass is reported."""
    watched_key: int | None = None
    """Position, from 1, of a key whose weight is measured in addition to the first key's."""

    def check(self) -> None:
        """Raise a one-line ValueError for what cannot be trained on, as far as the annotations do not say it."""
        for name in ("name", "fingerprint"):
            require(getattr(self, name).isprintable(), name, getattr(self, name), "must be one line")
        for name in FACTS.keys() & self.info.keys():
            check_value(f"info[{name!r}]", self.info[name], FACTS[name])
        for part, data in (("train", self.train), ("validation", self.validation)):
            data.check_contents(part, self.vocab_size, self.context_length)
        masks = {name: self.validation.positions.get(name) for name in self.row_groups}
        wrong = [name for name, mask in masks.items() if mask is None or mask.dtype != torch.bool]
        require(not wrong, "row_groups", wrong, "must each be among the validation's positions, as bool")
        unfit = [name for name in self.row_groups if not is_metric_name(f"mass/{name}")]
        require(not unfit, "row_groups", unfit, "MLflow takes no metric of this name")
        known = {*(self.row_contrast or ())} <= {*self.row_groups}
        require(known, "row_contrast", self.row_contrast, f"must be two of row_groups={self.row_groups}")
        check_value("watched_key", self.watched_key, Annotated[int, Bounds(ge=1, le=self.context_length)] | None)
        oracle = self.validation.positions.get("oracle_nll")
        finite = oracle is None or bool(oracle.isfinite().all())
        require(finite, "validation: positions", "oracle_nll", "must be finite")

    @property
    def outline(self) -> Outline:
        masked = "place" in self.train.__getitems__([0])
        return Outline(self.name, self.vocab_size, self.context_length, len(self.train), masked)


def fingerprint(parts: "Sequence[np.ndarray]") -> str:
    """Digest, 16 hex digits, of the arrays' types, shapes and values, and of the split into arrays."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.dtype.str}{part.shape}".encode())
        digest.update(part.tobytes())
    return digest.hexdigest()[:16]
