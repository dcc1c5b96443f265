"""Shards: the tokens of one file in the cache, each made by an independent job.

A shard is `NAME.bin` (the tokens, then a table of the documents) and `NAME.json` (metadata, with a sha256 of
`NAME.bin`). NAME is a digest of all that the content depends on. The `.json` file appears last, by an atomic rename: a
killed job leaves at most a temporary file, and runs again.
"""

import contextlib
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import Timeout

from lit_lazy.data.pipeline.documents import Document, Source
from lit_lazy.data.pipeline.tokeniser import Tokenizer, TokenizerSpec
from lit_lazy.support.checked_fields import require
from lit_lazy.support.console import plain_console
from lit_lazy.support.disk import write_atomically, write_text
from lit_lazy.support.locks import make_file_lock

LAYOUT = 2
"""Part of the names of shards and corpora: increase it when a change gives the same documents other tokens."""
BATCH_BYTES = 2**20
"""Minimum size of the batches of documents to encode."""
CHUNK_TOKENS = 2**22
"""Tokens of a shard read at a time."""
COLUMNS = 3
"""Columns of the table of documents: end offset of its tokens, bytes, hash."""

Count = Callable[[int, int], object]
"""Progress callback: additional bytes of text, additional training tokens."""


@dataclass(frozen=True)
class FileJob:
    """A file, or several small ones, to tokenise."""

    source: Source
    state: list[Any]
    """State of the source when the job was created: a changed file is another job."""
    tokenizer: TokenizerSpec
    limit: int | None
    """Training tokens after which reading stops; None for all documents."""
    share: float
    """Share of the documents that is held out, and so does not count towards the limit."""

    @property
    def name(self) -> str:
        limits = None if self.limit is None else [self.limit, self.share]
        boundaries = [self.tokenizer.begin_of_text, self.tokenizer.end_of_text]
        parts = [LAYOUT, self.state, self.source.column, self.tokenizer.digest, boundaries, limits]
        return f"shard-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]}"


@dataclass(frozen=True)
class Shard:
    """Tokens of a file; each document includes its begin token, if any, and its separator."""

    path: Path
    dtype: str
    tokens: int
    documents: int
    bytes: int
    """Bytes of the documents' text."""
    sampled: int
    """Number of documents that were decoded again."""
    lossy: int
    """How many of these did not come back."""
    sha256: str

    @classmethod
    def find(cls, folder: Path, name: str) -> "Shard | None":
        try:
            return cls(folder / f"{name}.bin", **json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def open_intact(self) -> BinaryIO | None:
        """The open file if it matches its sha256, otherwise None; reads all of it.

        An open file stays readable when another corpus of the same files removes the shard.
        """
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            file = stack.enter_context(self.path.open("rb"))
            if hashlib.file_digest(file, "sha256").hexdigest() == self.sha256:
                stack.pop_all()
                return file
        return None

    def remove(self) -> None:
        self.path.with_suffix(".json").unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def pieces(self, file: BinaryIO) -> "Iterator[Piece]":
        """Documents of its open file in order, in pieces of about CHUNK_TOKENS tokens to bound memory."""
        file.seek(self.tokens * np.dtype(self.dtype).itemsize)
        table = np.fromfile(file, np.uint64).reshape(-1, COLUMNS)
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
    """n documents of a shard: their concatenated tokens, and per document `[n]` the tokens, bytes and hash."""

    tokens: np.ndarray
    lengths: np.ndarray
    bytes: np.ndarray
    hashes: np.ndarray

    def select(self, mask: np.ndarray) -> "Piece":
        """Documents where `mask`, bool `[n]`, is true."""
        tokens = self.tokens[np.repeat(mask, self.lengths)]
        return Piece(tokens, self.lengths[mask], self.bytes[mask], self.hashes[mask])


def hash_document(document: bytes) -> int:
    """64-bit hash, the same on every machine."""
    return int.from_bytes(hashlib.sha256(document).digest()[:8])


def select_held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Mask of the held-out documents, bool; each depends only on its own hash."""
    return hashes < np.uint64(ceil(share * 2**64))  # exact: share is multiplied by a power of two


def find_or_make_shard(job: FileJob, folder: Path, count: Count) -> Shard:
    with lock(folder / f"{job.name}.lock"):
        return Shard.find(folder, job.name) or _make_shard(job, folder, count)


def _make_shard(job: FileJob, folder: Path, count: Count) -> Shard:
    tokenizer = job.tokenizer.build()
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    digest, table = hashlib.sha256(), array("Q")
    counts = Counter(tokens=0, documents=0, bytes=0, sampled=0, lossy=0)

    def write(file: BinaryIO) -> None:
        training = 0
        for documents, ids in encode_documents(tokenizer, job.source.documents(), job.tokenizer.control):
            if not counts["sampled"]:  # the first batch, which costs less than a hundredth of a large file's encoding
                lossy = tokenizer.count_lossy([text for _, text in documents], ids)
                counts.update(sampled=len(documents), lossy=lossy)
            before, counted = counts["bytes"], training
            for (where, text), text_ids in zip(documents, ids, strict=True):
                encoded, number = _add_boundary_tokens(tokenizer, text_ids, where), hash_document(text)
                raw = encoded.astype(dtype).tobytes()
                file.write(raw)
                digest.update(raw)
                counts["tokens"] += len(encoded)
                counts["documents"] += 1
                counts["bytes"] += len(text)
                table.extend((counts["tokens"], len(text), number))
                training += 0 if number < job.share * 2**64 else len(encoded)
                if is_full := job.limit is not None and training >= job.limit:
                    break
            count(counts["bytes"] - before, training - counted)
            if is_full:
                break
        file.write(table)
        digest.update(table)
        try:
            unchanged = job.source.read_state() == job.state
        except FileNotFoundError:
            unchanged = False
        require(unchanged, job.source.field, job.source.given, "changed while it was read; run again")

    write_atomically(folder / f"{job.name}.bin", write)
    facts: dict[str, Any] = {"dtype": dtype.str, **counts, "sha256": digest.hexdigest()}
    write_text(folder / f"{job.name}.json", json.dumps(facts))
    return Shard(folder / f"{job.name}.bin", **facts)


def remove_shard(folder: Path, name: str, *, keep_finished: bool = False) -> None:
    """Remove a shard and what killed processes left of it, unless another process holds its lock."""
    path = folder / f"{name}.lock"
    held = make_file_lock(path)
    try:
        held.acquire(timeout=0)
    except Timeout:
        return
    finished = [] if keep_finished else [folder / f"{name}.{kind}" for kind in ("json", "bin")]
    for left in (*finished, *folder.glob(f".{name}.*"), path):
        left.unlink(missing_ok=True)
    held.release()


def encode_documents(
    tokenizer: Tokenizer, documents: Iterable[Document], control: bool
) -> Iterator[tuple[list[Document], list[np.ndarray]]]:
    """Batches of about BATCH_BYTES: the documents, and the tokens of each text."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch, tokenizer.encode([text for _, text in batch], control)
            batch, size = [], 0
    if batch:
        yield batch, tokenizer.encode([text for _, text in batch], control)


def _add_boundary_tokens(tokenizer: Tokenizer, ids: np.ndarray, where: str) -> np.ndarray:
    """Tokens of a document. Raises a one-line ValueError if its text has a token that means a document's boundary."""
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    for boundary in (*begin, tokenizer.separator):
        if (ids == boundary).any():
            problem = f"{where} has a text that becomes token {boundary}, which separates documents"
            raise ValueError(f"{problem}; remove it there, or give another data.tokenizer")
    tokens = np.empty(len(begin) + len(ids) + 1, np.uint32)
    tokens[: len(begin)], tokens[len(begin) : -1], tokens[-1] = begin, ids, tokenizer.separator
    return tokens


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a file lock; its file is removed at the end, and waiting processes lock a new one."""
    held = make_file_lock(path)
    try:
        held.acquire(timeout=0)
    except Timeout:
        plain_console(stderr=True).print("another process is tokenising this text; waiting for it", soft_wrap=True)
        held.acquire()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        held.release()
