"""The cache in which a corpus is kept as tokens, and mapped into memory.

A corpus is a folder with `train.bin`, `validation.bin` (the tokens, in the smallest unsigned type that holds the
vocabulary) and `corpus.json` (what is known about them). It appears by one rename, made under a lock: several processes
that want the same corpus make it once, and one that is killed leaves only a `.partial` folder, which the next replaces.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lit_lazy.data.tokeniser import Tokenizer
from lit_lazy.support.console import plain_console
from lit_lazy.support.errors import one_line

BATCH_BYTES = 2**20
FACTS = "corpus.json"
PARTS = ("train", "validation")


@dataclass(frozen=True)
class Corpus:
    """The tokens of a corpus, mapped from its folder in the cache, and what is known about them."""

    train: np.ndarray
    """Unsigned `[n]`: the documents one after the other, each followed by the separator."""
    validation: np.ndarray
    vocab_size: int
    fingerprint: str
    """Digest of the vocabulary's size and of all tokens."""
    train_documents: int
    validation_documents: int
    bytes_per_token: float
    """Of the validation documents. A separator counts as one token and as one byte, as NUL does in byte tokens."""


def cache_folder() -> Path:
    """Where corpora are kept: `LIT_LAZY_CACHE`, or `~/.cache/lit-lazy/tokens`."""
    given = os.environ.get("LIT_LAZY_CACHE") or "~/.cache/lit-lazy/tokens"
    try:
        folder = Path(given).expanduser()
        folder.exists()
    except (OSError, RuntimeError) as error:  # a name too long, an unknown user
        raise ValueError(f"LIT_LAZY_CACHE={given!r}: cannot be used ({error}); set it to another folder") from None
    return folder


def open_corpus(folder: Path) -> Corpus:
    """Map a corpus; nothing is read but its facts."""
    try:
        facts = json.loads((folder / FACTS).read_text())
        train, validation = (np.memmap(folder / f"{part}.bin", facts["dtype"], mode="c") for part in PARTS)
        if [len(train), len(validation)] != facts["tokens"]:
            raise ValueError("another number of tokens")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"LIT_LAZY_CACHE={str(folder.parent)!r}: {folder.name} in it is damaged; delete that folder"
        ) from None
    return Corpus(
        train=train,
        validation=validation,
        vocab_size=facts["vocab_size"],
        fingerprint=facts["fingerprint"],
        train_documents=facts["documents"][0],
        validation_documents=facts["documents"][1],
        bytes_per_token=facts["bytes_per_token"],
    )


def make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write the folder, unless it is there, or comes while another process makes it.

    Raises ValueError when the cache cannot be written. Whatever is raised, nothing of the folder is left behind.
    """
    root = folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        try:
            with lock(root / f"{folder.name}.lock"):
                if not folder.exists():
                    _make(folder, fill)
        except BaseException:
            with contextlib.suppress(OSError):  # it holds other corpora
                root.rmdir()
            raise
    except OSError as error:
        raise ValueError(
            f"LIT_LAZY_CACHE={str(root)!r}: cannot be written ({error.strerror or one_line(error)}); "
            "set it to a folder with room that you may write"
        ) from None


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process
    try:
        partial.mkdir()
        fill(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


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


def write_corpus(
    folder: Path,
    tokenizer: Tokenizer,
    train: Iterable[bytes],
    validation: Iterable[bytes] | None,
    validation_share: float,
    max_tokens: int | None,
) -> None:
    """Tokenise documents into a folder.

    Without validation documents a share of the training documents is held out. At most max_tokens tokens, and one for
    the last target, are written of the training part, where reading ends, and of validation documents.
    Raises ValueError when one part gets no document.
    """
    limit = None if max_tokens is None else max_tokens + 1
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    with (
        _Part(folder / "train.bin", dtype, limit) as kept,
        _Part(folder / "validation.bin", dtype, limit if validation is not None else None) as held_out,
        _Meter(max_tokens) as meter,
    ):
        if validation is not None:
            for document, ids in encoded(tokenizer, validation):
                meter.count(held_out.add(document, ids, tokenizer.separator), 0)
                if held_out.is_full:
                    break
        for document, ids in encoded(tokenizer, train):
            part = held_out if validation is None and is_held_out(document, validation_share) else kept
            meter.count(part.add(document, ids, tokenizer.separator), kept.tokens)
            if kept.is_full:
                break
    for part, other, name in ((kept, held_out, "training"), (held_out, kept, "validation")):
        if part.documents == 0:
            raise ValueError(
                f"data.validation_share={validation_share}: none of the {other.documents} documents is for {name}; "
                "choose another share, give more documents, or give data.validation"
            )
    digest = hashlib.sha256(f"{tokenizer.vocab_size} {kept.digest.hexdigest()} {held_out.digest.hexdigest()}".encode())
    facts = {
        "dtype": dtype.str,
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": digest.hexdigest()[:16],
        "tokens": [kept.tokens, held_out.tokens],
        "documents": [kept.documents, held_out.documents],
        "bytes_per_token": held_out.bytes_per_token,
    }
    with (folder / FACTS).open("w") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())
    meter.report(kept.tokens + held_out.tokens)


def encoded(tokenizer: Tokenizer, documents: Iterable[bytes]) -> Iterator[tuple[bytes, np.ndarray]]:
    """Each document and its ids; the documents of a megabyte are encoded at once."""
    batch: list[bytes] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_BYTES:
            yield from zip(batch, tokenizer.encode(batch), strict=True)
            batch, size = [], 0
    yield from zip(batch, tokenizer.encode(batch), strict=True)


def is_held_out(document: bytes, share: float) -> bool:
    """Decided by the document alone, alike on every machine."""
    return int.from_bytes(hashlib.sha256(document).digest()[:8]) < share * 2**64


class _Part:
    """A file of tokens that is being written, and what is counted on the way."""

    def __init__(self, path: Path, dtype: np.dtype[Any], limit: int | None):
        self.file, self.dtype, self.limit = path.open("wb"), dtype, limit
        self.digest = hashlib.sha256(dtype.str.encode())
        self.tokens = self.documents = 0
        # Of whole documents, while `tokens` may end inside one.
        self._bytes = self._whole_tokens = 0

    def __enter__(self) -> "_Part":
        return self

    def __exit__(self, *_: object) -> None:
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.tokens >= self.limit

    @property
    def bytes_per_token(self) -> float:
        return (self._bytes + self.documents) / self._whole_tokens

    def add(self, document: bytes, ids: np.ndarray, separator: int) -> int:
        """Write a document's ids and the separator, as far as the limit; return the document's bytes."""
        tokens = np.empty(len(ids) + 1, self.dtype)
        tokens[:-1], tokens[-1] = ids, separator
        written = tokens if self.limit is None else tokens[: self.limit - self.tokens]
        raw = written.tobytes()
        self.file.write(raw)
        self.digest.update(raw)
        self.tokens += len(written)
        self.documents += 1
        self._bytes += len(document)
        self._whole_tokens += len(tokens)
        return len(document)


class _Meter:
    """Progress on a terminal, and in the end a line that says how fast it was."""

    def __init__(self, max_tokens: int | None):
        self.console = plain_console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("tokenising", total=max_tokens)
        self.started, self.shown, self.bytes = time.monotonic(), 0, 0

    def __enter__(self) -> "_Meter":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def count(self, size: int, tokens: int) -> None:
        """Note a document of `size` bytes; so many training tokens there are now."""
        self.bytes += size
        if self.bytes - self.shown >= BATCH_BYTES:
            self.shown = self.bytes
            self.progress.update(self.task, completed=tokens, description=f"tokenising, {self._rate()}")

    def report(self, tokens: int) -> None:
        """Print what was done."""
        self.console.print(f"tokenised {self._rate()}, into {tokens} tokens", highlight=False, soft_wrap=True)

    def _rate(self) -> str:
        megabytes = self.bytes / 1e6
        return f"{megabytes:.1f} MB at {megabytes / (time.monotonic() - self.started):.1f} MB/s"
