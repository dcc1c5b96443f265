"""One file's documents as tokens: a shard in the cache, made by a job that no other one depends on.

A shard is `NAME.bin` (the tokens, then a table of the documents) and `NAME.json` (what is known of them, with a sha256
of `NAME.bin`). The name stands for all that its content depends on. The `.json` file appears last, by a rename: a job
that is killed has left a `.partial` file at most, and is done again.
"""

import contextlib
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from lit_lazy.data.pipeline.documents import Source
from lit_lazy.data.pipeline.tokeniser import Tokenizer, TokenizerSpec
from lit_lazy.support.checks import require
from lit_lazy.support.console import plain_console
from lit_lazy.support.disk import write_text

BATCH_BYTES = 2**20
"""Of documents that are encoded at once, at least."""
CHUNK_TOKENS = 2**22
"""Of a shard that are read at once."""
COLUMNS = 3
"""Of the table of documents: where its tokens end, its bytes, its hash."""

Count = Callable[[int, int], object]
"""Takes note of so many more bytes of text, and training tokens."""


@dataclass(frozen=True)
class FileJob:
    """A file to be tokenised, or some small ones."""

    source: Source
    state: list[Any]
    """Of the source, when the job was made: a file that changes is another job's."""
    tokenizer: TokenizerSpec
    limit: int | None
    """Training tokens after which reading ends; None for all documents."""
    share: float
    """Share of the documents that are no training text, and so not counted to the limit."""

    @property
    def name(self) -> str:
        """Of its shard."""
        limits = None if self.limit is None else [self.limit, self.share]
        parts = [self.state, self.source.column, self.tokenizer.digest, self.tokenizer.special_tokens, limits]
        return f"shard-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]}"


@dataclass(frozen=True)
class Shard:
    """The tokens of a file, each document with its begin token, if any, and its separator."""

    path: Path
    dtype: str
    tokens: int
    documents: int
    bytes: int
    """Of the documents' text."""
    sha256: str

    @classmethod
    def find(cls, folder: Path, name: str) -> "Shard | None":
        """A finished shard; None where there is none."""
        try:
            return cls(folder / f"{name}.bin", **json.loads((folder / f"{name}.json").read_text()))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def is_whole(self) -> bool:
        """Whether it is what was written; reads it."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        except OSError:
            return False

    def remove(self) -> None:
        """From the cache."""
        self.path.with_suffix(".json").unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def pieces(self) -> "Iterator[Piece]":
        """Its documents in order, so many at a time that memory does not grow with them."""
        width = np.dtype(self.dtype).itemsize
        shape = -1, COLUMNS
        with self.path.open("rb") as file:  # once: another corpus of the same files may remove it
            file.seek(self.tokens * width)
            table = np.fromfile(file, np.uint64).reshape(shape)
            ends = table[:, 0].astype(np.int64)
            file.seek(0)
            first = start = 0
            while first < len(ends):
                last = max(first + 1, int(np.searchsorted(ends, start + CHUNK_TOKENS, side="right")))
                end, rows = int(ends[last - 1]), slice(first, last)
                tokens = np.fromfile(file, self.dtype, end - start)
                yield Piece(tokens, np.diff(ends[rows], prepend=start), table[rows, 1].astype(np.int64), table[rows, 2])
                first, start = last, end


@dataclass(frozen=True)
class Piece:
    """n documents of a shard: their tokens, laid end to end, and of each `[n]` the tokens, bytes and hash."""

    tokens: np.ndarray
    lengths: np.ndarray
    bytes: np.ndarray
    hashes: np.ndarray

    def select(self, chosen: np.ndarray) -> "Piece":
        """The chosen documents, bool `[n]`."""
        of_chosen = np.repeat(chosen, self.lengths)
        return Piece(self.tokens[of_chosen], self.lengths[chosen], self.bytes[chosen], self.hashes[chosen])


def document_hash(document: bytes) -> int:
    """64 bits, alike on every machine."""
    return int.from_bytes(hashlib.sha256(document).digest()[:8])


def select_held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Which documents are no training text, bool: decided by each one alone."""
    return hashes < np.uint64(ceil(share * 2**64))  # both exact: share is multiplied by a power of two


def find_or_make_shard(job: FileJob, folder: Path, count: Count) -> Shard:
    """The shard of a job: the one that is there, or it is made now."""
    with lock(folder / f"{job.name}.lock"):
        return Shard.find(folder, job.name) or _make(job, folder, count)


def _make(job: FileJob, folder: Path, count: Count) -> Shard:
    tokenizer = job.tokenizer.build()
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    partial, digest, table = folder / f".{job.name}.partial", hashlib.sha256(), array("Q")
    tokens = training = size = 0
    try:
        with partial.open("wb") as file:

            def write(raw: bytes) -> None:
                file.write(raw)
                digest.update(raw)

            for documents, ids in encode_documents(tokenizer, job.source.documents()):
                before, counted = size, training
                for document, own in zip(documents, ids, strict=True):
                    write(own.astype(dtype).tobytes())
                    tokens, size = tokens + len(own), size + len(document)
                    number = document_hash(document)
                    table.extend((tokens, len(document), number))
                    training += 0 if number < job.share * 2**64 else len(own)
                    if job.limit is not None and training >= job.limit:
                        break
                count(size - before, training - counted)
                if job.limit is not None and training >= job.limit:
                    break
            write(table.tobytes())
            file.flush()
            os.fsync(file.fileno())
        try:
            unchanged = job.source.read_state() == job.state
        except FileNotFoundError:
            unchanged = False
        require(unchanged, job.source.field, job.source.given, "was changed while it was read; run again")
        partial.replace(folder / f"{job.name}.bin")
    finally:
        partial.unlink(missing_ok=True)
    facts = {
        "dtype": dtype.str,
        "tokens": tokens,
        "documents": len(table) // COLUMNS,
        "bytes": size,
        "sha256": digest.hexdigest(),
    }
    write_text(folder / f"{job.name}.json", json.dumps(facts))
    return Shard(folder / f"{job.name}.bin", **facts)


def remove_shard(job: FileJob, folder: Path) -> None:
    """Remove a job's shard, and what a killed process left of it, unless another process is at it."""
    path = folder / f"{job.name}.lock"
    held = FileLock(path)
    try:
        held.acquire(timeout=0)
    except Timeout:
        return
    for kind in ("json", "bin"):
        (folder / f"{job.name}.{kind}").unlink(missing_ok=True)
    remove_leftovers(folder, job.name)
    held.release()


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove what a killed process left of a shard beside it."""
    for left in (folder / f"{name}.lock", *folder.glob(f".{name}.*")):
        left.unlink(missing_ok=True)


def encode_documents(
    tokenizer: Tokenizer, documents: Iterable[bytes]
) -> Iterator[tuple[list[bytes], list[np.ndarray]]]:
    """Documents and the tokens of each, those that begin and end it included; a megabyte is encoded at once."""
    batch: list[bytes] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_BYTES:
            yield batch, [_add_boundary_tokens(tokenizer, ids) for ids in tokenizer.encode(batch)]
            batch, size = [], 0
    if batch:
        yield batch, [_add_boundary_tokens(tokenizer, ids) for ids in tokenizer.encode(batch)]


def _add_boundary_tokens(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    tokens = np.empty(len(begin) + len(ids) + 1, np.uint32)
    tokens[: len(begin)], tokens[len(begin) : -1], tokens[-1] = begin, ids, tokenizer.separator
    return tokens


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a file lock; the file goes with it, and those who wait for it take its successor."""
    held = FileLock(path)
    try:
        held.acquire(timeout=0)
    except Timeout:
        plain_console(stderr=True).print("another process tokenises this text: waiting for it", soft_wrap=True)
        held.acquire()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        held.release()
