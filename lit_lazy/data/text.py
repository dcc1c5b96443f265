"""Custom text or a dataset of the Hugging Face Hub: tokenised once, cached, memory-mapped."""

import functools
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from lit_lazy.data.pipeline.corpus_cache import (
    PARTS,
    Corpus,
    CorpusPlan,
    cache_folder,
    is_intact,
    make_once,
    read_stamp,
    write_corpus,
)
from lit_lazy.data.pipeline.documents import Files, Source
from lit_lazy.data.pipeline.files import find_files
from lit_lazy.data.pipeline.hub import Hub
from lit_lazy.data.pipeline.shards import LAYOUT, FileJob
from lit_lazy.data.pipeline.tokeniser import BYTES, Tokenizer, TokenizerSpec
from lit_lazy.data.sampler import pick_evenly
from lit_lazy.data.source_interface import DataConfig, DataSource, Outline, SpecialTokens
from lit_lazy.data.stdlib import ByteTrigram, cut_windows, trigrams
from lit_lazy.data.token_dataset import DocumentDataset, TokenDataset
from lit_lazy.support.checked_fields import Bounds, PositiveInt, check_value, require
from lit_lazy.support.console import format_count, plain_console
from lit_lazy.support.error_messages import short_repr

MOST_OVERLAP = 0.1
"""Largest share of a separate validation text that may be in the training text too, unless asked for."""
FEW_DOCUMENTS = 20
"""Of fewer documents a hash might hold out none, or all."""
USUAL_VOCABULARY = 32_000
"""Assumed of a tokenizer whose file is not on this machine: that of Llama 2, and of the FineWeb experiments."""
# Most training bytes on which the trigram is counted: counting takes about 40 bytes of memory for each.
TRIGRAM_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Text(DataConfig):
    """Text from files of any name, .jsonl or .parquet files, or from a dataset of the Hugging Face Hub.

    The documents, each followed by a separator, are concatenated and cut into windows that do not overlap. Empty
    documents are skipped. A text file of up to 64 KiB is one document; a longer one is split at the first blank
    line after every 16 KiB. Documents longer than 16 MiB raise an error.
    """

    path: str = ""
    """File, folder or glob of text, .jsonl, .json (one object per line) or .parquet files, also .gz or .zst."""
    hub: str = ""
    """Instead of a path: name of a Hugging Face Hub dataset, or a folder with the same layout."""
    hub_config: str | None = None
    """Configuration of the hub dataset; None if it has only one."""
    revision: str | None = None
    """Commit or branch of the hub dataset; None for the newest at the first read."""
    split: str = "train"
    """Split of the hub dataset to train on."""
    stream: bool = False
    """Read only as much of the hub dataset as max_tokens needs, instead of downloading all of it."""
    column: str = "text"
    """Column with the text; ignored for text files."""
    tokenizer: str = BYTES
    """bytes (separator NUL), or a JSON file of the tokenizers library."""
    end_of_text: str | None = None
    """Token of the tokenizers file after every document; None for its <|endoftext|>, </s> or similar."""
    begin_of_text: str | None = None
    """Token of the tokenizers file before every document, such as <s>; None for none."""
    special_tokens: SpecialTokens = field(default_factory=SpecialTokens)
    """Of an imported model, for `generate`, `lm-eval` and `export`: no part of the text."""
    document_mask: bool = False
    """Restrict attention to documents, and count positions from each document's first token in the window. The loss
    still includes every target, also a document's first token, which is predicted from the separator before it."""
    bos: bool = False
    """Begin every window with the separator, as its BOS token."""
    context_length: Annotated[int, Bounds(ge=2)] = 256
    """Tokens per window."""
    max_tokens: int | None = None
    """Maximum number of training tokens, and of validation tokens if `validation` is set; None for all."""
    validation: str = ""
    """Validation text: a path, or a split of the hub dataset. Empty to hold out a share of the documents."""
    validation_share: Annotated[float, Bounds(gt=0, lt=1)] = 0.1
    """Share of the documents held out, selected by a hash of their text, if `validation` is empty; of fewer than 20
    documents in files the end of each."""
    validation_windows: PositiveInt = 256
    """Number of validation windows, evenly spread over the validation text; all of a text that has fewer."""
    validation_overlap: bool = False
    """Allow a `validation` of which more than a tenth of the documents are in the training text too."""

    def __post_init__(self) -> None:
        check_value("data.max_tokens", self.max_tokens, Annotated[int, Bounds(ge=self.context_length)] | None)
        require(not (self.path and self.hub), "data.hub", self.hub, f"excludes data.path={self.path!r}; give one")
        require(not self.stream or bool(self.hub), "data.stream", self.stream, "needs data.hub; files are streamed")
        require(not self.stream or self.max_tokens is not None, "data.stream", self.stream, "needs data.max_tokens")
        fix = "excludes data.document_mask, whose documents begin at any place; give one"
        require(not (self.bos and self.document_mask), "data.bos", self.bos, fix)
        for name in ("begin_of_text", "end_of_text") if self.tokenizer == BYTES else ():
            value = getattr(self, name)
            require(not value, f"data.{name}", value, "needs a data.tokenizer file; bytes have none")

    def load(self) -> DataSource:
        folder = self.tokenise()
        return _build_source(self, folder, read_stamp(folder))

    def outline(self) -> Outline:
        if is_intact(cache_folder() / self._key(self._sources())):
            return super().outline()
        return Outline("text", self.load_tokenizer().vocab_size, self.context_length, None, self.document_mask)

    def outline_elsewhere(self) -> Outline:
        if self.tokenizer == BYTES or Path(self.tokenizer).expanduser().exists():
            return self.outline()
        assumed = f"data.tokenizer={self.tokenizer!r} is not here; a vocabulary of {USUAL_VOCABULARY:,} is assumed"
        return Outline("text", USUAL_VOCABULARY, self.context_length, None, self.document_mask, assumed)

    def tokenise(self, processes: int | None = None) -> Path:
        sources = self._sources()
        folder = cache_folder() / self._key(sources)
        if not is_intact(folder):
            self._tokenise(folder, sources, processes)
        return folder

    def load_tokenizer(self) -> Tokenizer:
        return self._spec.build()

    def begin_prompt(self, tokenizer: Tokenizer) -> int | None:
        return tokenizer.separator if self.bos else tokenizer.begin

    def name_special_tokens(self, tokenizer: Tokenizer) -> SpecialTokens:
        return self.special_tokens if self.special_tokens.ends else super().name_special_tokens(tokenizer)

    def hash_tokenizer(self) -> str | None:
        return self._spec.hash_file()

    def select_validation(self, corpus: Corpus) -> tuple[slice, float]:
        """The validation tokens of a corpus that count, and their bytes per token."""
        return slice(0, len(corpus.validation)), corpus.bytes_per_token

    def _sources(self) -> Sequence[Source]:
        """Training text, and validation text unless that is a share of the training text."""
        require(bool(self.path or self.hub), "data.path", self.path, "give your text, as in --data.path=FILE")
        for name in ("split", "revision", "hub_config"):
            unused = not self.hub and getattr(self, name) != getattr(type(self), name)
            require(not unused, f"data.{name}", getattr(self, name), "needs data.hub, a file has none; remove it")
        given = {"path": self.path, "validation": self.validation}
        if not self.hub:
            fields = [(f"data.{name}", text) for name, text in given.items() if text]
            return [Files(*field, self.column, *find_files(*field)) for field in fields]
        require(self.split != self.validation, "data.validation", self.validation, "equals data.split; change one")
        splits = [self.split, self.validation] if self.validation else [self.split]
        options = self.hub_config, self.revision
        return [Hub("data.hub", self.hub, self.column, *options, name, self.stream) for name in splits]

    def _key(self, sources: Sequence[Source]) -> str:
        """Digest of all that the tokens depend on; files count by size and modification time, without reading them."""
        train, *validation = (source.read_state() for source in sources)
        parts = {
            "layout": LAYOUT,
            "train": train,
            "validation": validation[0] if validation else self.validation_share,
            "column": self.column,
            "tokenizer": self._spec.digest,
            "end_of_text": self.end_of_text,
            "max_tokens": self.max_tokens,
            **({"begin_of_text": self.begin_of_text} if self.begin_of_text else {}),
        }
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]

    @property
    def _spec(self) -> TokenizerSpec:
        return TokenizerSpec(self.tokenizer, self.begin_of_text, self.end_of_text)

    def _tokenise(self, folder: Path, sources: Sequence[Source], processes: int | None) -> None:
        vocab_size = self._spec.build().vocab_size
        # Read the first documents before creating anything.
        parts = [require_documents(source) for source in sources]
        train, given = sources[0], [f"{source.field}={short_repr(source.given)}" for source in sources]
        left_out = [source.left_out if isinstance(source, Files) else "" for source in sources]
        lines = [f"{text}: left out {names}" for text, names in zip(given, left_out, strict=True) if names]
        if isinstance(train, Files) and len(sources) == 1:
            count, middle = len([*itertools.islice(train.documents(), FEW_DOCUMENTS)]), 1 - self.validation_share
            if count < FEW_DOCUMENTS:
                parts = [replace(train, span=span).split_parts() for span in ((0.0, middle), (middle, 1.0))]
                few = f"{format_count(count, 'document')} are too few to choose from"
                share = f"the last {self.validation_share:.0%} of each are the validation text"
                lines.append(f"{given[0]}: {few}, so {share}")

        def fill(partial: Path) -> None:
            share = self.validation_share if len(parts) == 1 else 0.0
            jobs, held_out = (self._jobs(files, share) for files in (*parts, ())[:2])
            plan = CorpusPlan(jobs, held_out, vocab_size, self.validation_share)
            write_corpus(partial, plan, processes, check)
            for line in lines:
                plain_console(stderr=True).print(line, soft_wrap=True)

        def check() -> None:
            try:
                unchanged = self._key(sources) == folder.name
            except FileNotFoundError:
                unchanged = False
            require(unchanged, train.field, train.given, "changed while it was read; run again")

        make_once(folder, fill)

    def _jobs(self, files: Sequence[Source], share: float) -> list[FileJob]:
        limit = None if self.max_tokens is None else self.max_tokens + 1
        return [FileJob(file, file.read_state(), self._spec, limit, share) for file in files]


def require_documents(source: Source) -> Sequence[Source]:
    """Parts of a source. Raises ValueError if they hold no document or the first one cannot be read."""
    parts = source.split_parts()
    if not any(True for part in parts for _ in part.documents()):
        raise ValueError(f"{source.field}={source.given!r}: contains no text; give files with text")
    return parts


@functools.cache
def _build_source(config: Text, folder: Path, stamp: tuple[int, int]) -> DataSource:  # noqa: ARG001
    corpus = Corpus(folder)
    apart = config.validation_overlap or corpus.validation_overlap <= MOST_OVERLAP
    shared = f"the training text has {corpus.validation_overlap:.0%} of its documents too; give other text"
    require(apart, "data.validation", config.validation, f"{shared}, or allow it by data.validation_overlap=True")
    length, byte_tokens = config.context_length, config.tokenizer == BYTES
    if config.bos or byte_tokens:  # windows with BOS are copies, n-grams are counted all over the text
        for part in PARTS:
            corpus.check(part, np.zeros(1, int), len(getattr(corpus, part)))
    bos = config.load_tokenizer().separator if config.bos else None
    counted, bytes_per_token = config.select_validation(corpus)
    validation_text = corpus.validation[counted]
    train, validation = cut_windows(corpus.train, length, bos), cut_windows(validation_text, length, bos)
    fix = f"the training text has {len(corpus.train)} tokens; choose a smaller length"
    require(len(train) > 0, "data.context_length", length, fix)
    longer = "a longer data.validation" if config.validation else "a larger data.validation_share"
    fix = f"the validation text has {len(validation_text)} tokens; choose a smaller length, or {longer}"
    require(len(validation) > 0, "data.context_length", length, fix)
    chosen = pick_evenly(len(validation), min(len(validation), config.validation_windows))
    if len(chosen) < config.validation_windows:
        fewer = f"data.validation_windows={config.validation_windows}: the validation text has {len(chosen)}, all count"
        plain_console(stderr=True).print(fewer, soft_wrap=True)
    corpus.check("validation", counted.start + chosen * length, length + 1)
    return DataSource(
        name="text",
        vocab_size=corpus.vocab_size,
        context_length=length,
        fingerprint=corpus.fingerprint,
        info={
            "bytes_per_token": bytes_per_token,
            "train_documents": corpus.train_documents,
            "validation_documents": corpus.validation_documents,
            "train_tokens": len(train) * length,
            "validation_tokens": len(chosen) * length,
            **{name: share for name in ("validation_overlap", "lossy_documents") if (share := getattr(corpus, name))},
            **(measure_ngrams(train, validation_text, chosen, config.bos) if byte_tokens else {}),
        },
        train=_make_dataset(config, corpus, "train", train, np.arange(len(train)) * length),
        validation=_make_dataset(config, corpus, "validation", validation[chosen], counted.start + chosen * length),
    )


def _make_dataset(config: Text, corpus: Corpus, part: str, windows: torch.Tensor, starts: np.ndarray) -> TokenDataset:
    """Dataset of windows `[n, L + 1]`; `starts` `[n]` are their offsets in the part."""
    length = config.context_length + 1

    def check(index: int | list[int]) -> None:
        corpus.check(part, np.atleast_1d(starts[index]), length)

    if not config.document_mask:
        return TokenDataset(windows, check=check)
    return DocumentDataset(windows, starts, corpus.ends(part), check)


def measure_ngrams(
    train: torch.Tensor, validation: np.ndarray, chosen: np.ndarray, bos: bool = False
) -> dict[str, float]:
    """Bits per byte of unigram and trigram on the targets of the chosen validation windows, as for Stdlib.

    They are counted on at most TRIGRAM_BYTES of the training windows `[N, L + 1]`, evenly spread. bos: whether windows
    begin with a BOS token, which is no part of the text.
    """
    length = train.shape[1] - 1
    picked = train[pick_evenly(len(train), min(len(train), max(1, TRIGRAM_BYTES // length)))]
    counted = picked[:, 1:] if bos else picked[:, :-1]
    # From two bytes before the first target to the last target, with NUL before the text.
    positions = chosen[:, None] * length + np.arange(-1, length + 1) - bos
    text = np.where(positions < 0, 0, validation[positions])
    windows = trigrams(text.ravel()).reshape(text.shape)[:, 2:]
    return ByteTrigram(counted.numpy().ravel()).measure_bits(windows.ravel())
