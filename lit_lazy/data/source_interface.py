"""Interface of the data sources: a config, and the sequences that it loads."""

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch

from lit_lazy.data.token_dataset import TokenDataset
from lit_lazy.support.checked_fields import (
    Bounds,
    CheckedFields,
    NonEmptyText,
    PositiveFloat,
    PositiveInt,
    Share,
    check_fields,
    check_value,
    require,
)
from lit_lazy.support.error_messages import naming, naming_user_errors, short_repr
from lit_lazy.support.names_to_paths import is_metric_name

if TYPE_CHECKING:
    import numpy as np

    from lit_lazy.data.pipeline.tokeniser import Tokenizer

FACTS = {
    **dict.fromkeys(("optimum_nats", "chance_nats", "unigram_bits_per_byte", "trigram_bits_per_byte"), float),
    **dict.fromkeys(("validation_overlap", "lossy_documents"), Share),
    "bytes_per_token": PositiveFloat,
    "train_tokens": PositiveInt,
}
"""What `DataSource.info` may hold that figures are computed from."""


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
    """Ids of the tokens with which a source begins, ends and pads a text."""

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
        """`outline` for an estimate of a training on another machine, whose tokenizer may be missing here."""
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

    def begin_prompt(self, tokenizer: "Tokenizer") -> int | None:
        """Token before every prompt, as the training's documents or windows begin; None for none."""
        return tokenizer.begin

    def name_special_tokens(self, tokenizer: "Tokenizer") -> SpecialTokens:
        """Tokens that begin, end and pad a text of the source."""
        return SpecialTokens(tokenizer.begin, (tokenizer.separator,), tokenizer.separator)

    def hash_tokenizer(self) -> str | None:
        """Digest of the tokeniser's file; None for a source without such a file."""
        return None


@dataclass(frozen=True)
class DataSource:
    """Loaded sequences of a run, and the facts about them that the run logs."""

    name: NonEmptyText
    vocab_size: PositiveInt
    """Number of token ids, including special ones: the size of the model's embedding."""
    context_length: Annotated[int, Bounds(ge=2)]
    """L: number of tokens, and of targets, per sequence."""
    fingerprint: NonEmptyText
    """Digest of the training and validation content actually used; part of a run's key."""
    info: dict[str, str | int | float]
    """Sizes, versions, and the losses of known predictors on the validation targets, as for `compute_learned_nats`."""
    train: TokenDataset
    validation: TokenDataset
    row_groups: tuple[str, ...] = ()
    """Names of the batch's bool `[B, L]` masks of query rows that are measured separately.

    If the batch has `oracle_nll`, also the losses and the accuracy of those with a target that is not ignored.
    """
    row_contrast: tuple[str, str] | None = None
    """Two of these groups; the difference of their attention mass is reported."""
    watched_key: int | None = None
    """Position, from 1, of a key whose weight is measured in addition to the first key's."""

    def check(self) -> None:
        """Raise a one-line ValueError for what cannot be trained on, as far as the annotations do not say it."""
        for name in ("name", "fingerprint"):
            require(getattr(self, name).isprintable(), name, getattr(self, name), "must be one line")
        for name, kind in FACTS.items():
            if name in self.info:
                check_value(f"info[{name!r}]", self.info[name], kind)
        for part, data in (("train", self.train), ("validation", self.validation)):
            data.check_contents(part, self.vocab_size, self.context_length)
        masked = [part for part in ("train", "validation") if "place" in getattr(self, part).__getitems__([0])]
        require(len(masked) != 1, "positions with place", masked, "must be those of train and validation, or neither")
        masks = {name: self.validation.positions.get(name) for name in self.row_groups}
        wrong = [name for name, mask in masks.items() if mask is None or mask.dtype != torch.bool]
        require(not wrong, "row_groups", wrong, "must each be among the validation's positions, as bool")
        unfit = [name for name in self.row_groups if not is_metric_name(f"mass/{name}")]
        require(not unfit, "row_groups", unfit, "MLflow takes no metric of this name")
        known = {*(self.row_contrast or ())} <= {*self.row_groups}
        require(known, "row_contrast", self.row_contrast, f"must be two of row_groups={self.row_groups}")
        check_value("watched_key", self.watched_key, Annotated[int, Bounds(ge=1, le=self.context_length)] | None)
        require(not (self.watched_key and masked), "watched_key", self.watched_key, "needs data without place")
        oracle = self.validation.positions.get("oracle_nll")
        finite = oracle is None or bool(oracle.isfinite().all())
        require(finite, "validation: positions", "oracle_nll", "must be finite")

    @property
    def outline(self) -> Outline:
        masked = "place" in self.train.__getitems__([0])
        return Outline(self.name, self.vocab_size, self.context_length, len(self.train), masked)


def load_data(config: DataConfig) -> DataSource:
    """Load and check a data config's data, at any length. Raises a one-line ValueError if either fails."""
    name = f"data={type(config).__name__}"
    with naming_user_errors(name):
        source = config.load()
    if not isinstance(source, DataSource):
        raise ValueError(f"{name}: load() returned {short_repr(source)}; let it return a DataSource")
    check_fields(f"{name}: ", source)
    with naming(name):
        source.check()
        # Measurements at several lengths would be the same one under several names.
        asked, found = getattr(config, "context_length", source.context_length), source.context_length
        fix = f"load() gives sequences of {found} tokens; let it give as many as its context_length says"
        require(found == asked, "context_length", asked, fix)
    return source


def fingerprint(parts: "Sequence[np.ndarray]") -> str:
    """Digest, 16 hex digits, of the arrays' types, shapes and values, and of the split into arrays."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.dtype.str}{part.shape}".encode())
        digest.update(part.tobytes())
    return digest.hexdigest()[:16]
