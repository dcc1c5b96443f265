"""The cache in which a corpus is kept as tokens, and mapped into memory.

A corpus is a folder with `train.bin`, `validation.bin` (the tokens, in the smallest unsigned type that holds the
vocabulary), `train.ends`, `validation.ends` (where each document ends, int64) and `corpus.json` (what is known about
them). It is joined from the shards of its files (`lit_lazy.data.pipeline.shards`), which stay beside it until it is
whole. It appears by one rename under a lock: several processes that want the same corpus make it once, and a process
that is killed leaves finished shards, which the next one uses, and `.partial` folders and files, which the next one
replaces.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lit_lazy.data.pipeline.shards import FileJob, Piece, Shard, find_or_make_shard, lock, remove_shard, select_held_out
from lit_lazy.data.pipeline.workers import choose_process_count, make_shards
from lit_lazy.support.console import plain_console
from lit_lazy.support.disk import write_text
from lit_lazy.support.errors import one_line

FACTS = "corpus.json"
PARTS = ("train", "validation")
ATTEMPTS = 3
"""At a shard that is not as it was written; another corpus of the same files may have removed it."""


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
    """Of the validation documents. A separator counts as one token and as one byte, as NUL does in byte tokens; a token
    that begins a document counts as one token and no byte."""
    folder: Path

    def ends(self, part: str) -> np.ndarray:
        """Where each document of a part ends, the separator included: int64 `[documents]`, mapped."""
        try:
            return np.memmap(self.folder / f"{part}.ends", np.int64, mode="c")
        except (OSError, ValueError):
            raise ValueError(
                f"data.document_mask=True: {self.folder} was made by an earlier version, which did not keep where "
                "documents end; delete that folder"
            ) from None


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
        folder=folder,
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
            with contextlib.suppress(OSError):  # it holds other corpora, or finished shards
                root.rmdir()
            raise
    except OSError as error:
        raise ValueError(
            f"LIT_LAZY_CACHE={str(root)!r}: cannot be written ({error.strerror or one_line(error)}); "
            "set it to a folder with room that you may write"
        ) from None


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    if not (partial / FACTS).exists():  # which come last
        shutil.rmtree(partial, ignore_errors=True)  # of a killed process
    try:
        partial.mkdir(exist_ok=True)
        fill(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@dataclass(frozen=True)
class CorpusPlan:
    """How a corpus is made: the files to tokenise, in their order, and how they are split."""

    train: Sequence[FileJob]
    validation: Sequence[FileJob]
    """Empty where a share of the training documents is held out."""
    vocab_size: int
    validation_share: float
    max_tokens: int | None

    @property
    def limit(self) -> int | None:
        """Tokens that are kept of a part that is limited: one more, for the last target."""
        return None if self.max_tokens is None else self.max_tokens + 1


def write_corpus(folder: Path, plan: CorpusPlan, processes: int | None, check: Callable[[], object]) -> None:
    """Tokenise documents into a folder, which may hold the corpus already.

    Without validation documents a share of the training documents is held out. At most max_tokens tokens, and one for
    the last target, are written of the training part, where reading ends, and of validation documents.
    check: called before the corpus counts as whole. Raises ValueError when one part gets no document.
    """
    shards = folder.parent
    jobs = [*plan.validation, *plan.train]
    if not (folder / FACTS).exists():
        with _Meter(jobs, shards, plan.max_tokens) as meter:
            facts = _join(folder, plan, shards, processes, meter)
            if misfit := _explain_misfit(facts, plan):
                _remove_shards(jobs, shards)
                raise ValueError(misfit)
        check()
        write_text(folder / FACTS, json.dumps(facts))
        meter.report(sum(facts["tokens"]))
    _remove_shards(jobs, shards)


def _remove_shards(jobs: Iterable[FileJob], shards: Path) -> None:
    """Remove what a corpus was joined of."""
    for job in jobs:
        remove_shard(job, shards)


def _explain_misfit(facts: dict[str, Any], plan: CorpusPlan) -> str:
    """What is wrong with the split; "" where both parts have documents."""
    if all(facts["documents"]):
        return ""
    there, empty = sum(facts["documents"]), "validation" if facts["documents"][0] else "training"
    return (
        f"data.validation_share={plan.validation_share}: none of the {there} documents is for {empty}; "
        "choose another share, give more documents, or give data.validation"
    )


def _join(folder: Path, plan: CorpusPlan, shards: Path, processes: int | None, meter: "_Meter") -> dict[str, Any]:
    """Write the parts of the corpus as its shards come; what is known of them."""
    dtype, limit = np.min_scalar_type(plan.vocab_size - 1), plan.limit
    share = 0.0 if plan.validation else plan.validation_share
    with (
        _PartWriter(folder, "train", dtype, limit) as kept,
        _PartWriter(folder, "validation", dtype, limit if plan.validation else None) as apart,
    ):
        for jobs, part in ((plan.validation, apart), (plan.train, kept)):
            with closing(make_shards(jobs, shards, choose_process_count(jobs, processes), meter.count)) as found:
                for job, shard in zip(jobs, found, strict=False):
                    _append(_ensure_whole(shard, job, shards, meter), part, apart, share if part is kept else 0.0)
                    meter.count_shard(shard)
                    if part.is_full:
                        break
    digest = hashlib.sha256(f"{plan.vocab_size} {kept.digest.hexdigest()} {apart.digest.hexdigest()}".encode())
    return {
        "dtype": dtype.str,
        "vocab_size": plan.vocab_size,
        "fingerprint": digest.hexdigest()[:16],
        "tokens": [kept.tokens, apart.tokens],
        "documents": [kept.documents, apart.documents],
        "bytes_per_token": apart.bytes_per_token,
    }


def _ensure_whole(shard: Shard, job: FileJob, shards: Path, meter: "_Meter") -> Shard:
    """A shard as it was written: made again where it is damaged, or has gone since."""
    for _ in range(ATTEMPTS):
        if shard.is_whole():
            return shard
        meter.say(f"a shard of {job.source.given} in {shards} is damaged: made again")
        shard.remove()
        shard = find_or_make_shard(job, shards, meter.count)
    raise OSError(errno.EIO, "what was written is not what is read")


def _append(shard: Shard, part: "_PartWriter", apart: "_PartWriter", share: float) -> None:
    """A shard's documents, up to the one that fills the part; those of the share go apart."""
    for piece in shard.pieces():
        other = select_held_out(piece.hashes, share)
        if part.limit is not None:
            reached = part.tokens + np.cumsum(np.where(other, 0, piece.lengths)) >= part.limit
            read = np.arange(len(other)) <= (int(reached.argmax()) if reached.any() else len(other))
        else:
            read = np.ones(len(other), bool)
        part.add(piece.select(read & ~other))
        if share:
            apart.add(piece.select(read & other))
        if part.is_full:
            return


class _PartWriter:
    """A file of tokens and one of the documents' ends, and what is counted on the way."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], limit: int | None) -> None:
        self.files = [(folder / f"{name}.{kind}").open("wb") for kind in ("bin", "ends")]
        self.dtype, self.limit = dtype, limit
        self.digest = hashlib.sha256(dtype.str.encode())
        self.tokens = self.documents = 0
        # Of whole documents, while `tokens` may end inside one.
        self._bytes = self._whole_tokens = 0

    def __enter__(self) -> "_PartWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            with file:
                file.flush()
                os.fsync(file.fileno())

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.tokens >= self.limit

    @property
    def bytes_per_token(self) -> float:
        return (self._bytes + self.documents) / max(self._whole_tokens, 1)

    def add(self, piece: Piece) -> None:
        """Write documents, as far as the limit."""
        ends = self.tokens + np.cumsum(piece.lengths, dtype=np.int64)
        written = piece.tokens if self.limit is None else piece.tokens[: self.limit - self.tokens]
        raw = written.astype(self.dtype, copy=False).tobytes()
        tokens, ends_file = self.files
        tokens.write(raw)
        self.digest.update(raw)
        self.tokens += len(written)
        ends_file.write(np.minimum(ends, self.tokens).tobytes())
        self.documents += len(ends)
        self._bytes += int(piece.bytes.sum())
        self._whole_tokens += len(piece.tokens)


class _Meter:
    """Progress on a terminal, and in the end a line that says how fast it was."""

    def __init__(self, jobs: Iterable[FileJob], shards: Path, max_tokens: int | None) -> None:
        self.console = plain_console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.sizes = {job.name: job.source.size for job in jobs}
        self.task = self.progress.add_task("tokenising", total=None)
        self.max_tokens, self.lock = max_tokens, threading.Lock()
        self.found = {name: shard for name in self.sizes if (shard := Shard.find(shards, name)) is not None}
        self.started = time.monotonic()
        self.bytes = self.tokens = self.joined = self.joined_bytes = 0

    def __enter__(self) -> "_Meter":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def count(self, size: int, tokens: int) -> None:
        """Note so many more bytes of text, and training tokens; from any thread."""
        with self.lock:
            self.bytes, self.tokens = self.bytes + size, self.tokens + tokens
            done = self.bytes + sum(shard.bytes for shard in self.found.values())
            total = self._estimate_total(done)
            rest = (
                ""
                if total is None
                else f", {_format_duration((total - done) * self._seconds / max(self.bytes, 1))} left"
            )
            files = f", {self.joined} of {len(self.sizes)} parts" if len(self.sizes) > 1 else ""
            self.progress.update(
                self.task, completed=done, total=total, description=f"tokenising, {self._format_rate()}{files}{rest}"
            )

    def _estimate_total(self, done: int) -> float | None:
        """Bytes of text there will be in all, as far as can be told: by the limit, or by the files joined so far."""
        if self.max_tokens is not None and self.tokens:
            return max(done, self.bytes * self.max_tokens / self.tokens)
        if not self.joined:
            return None
        share = self.joined / len(self.sizes)
        return max(done, self.joined_bytes / share)

    def count_shard(self, shard: Shard) -> None:
        """Note that a file is done."""
        with self.lock:
            self.joined += 1
            self.joined_bytes += shard.bytes

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, soft_wrap=True)

    def report(self, tokens: int) -> None:
        """Print what was done."""
        kept = f", {len(self.found)} parts were done before" if self.found else ""
        self.console.print(
            f"tokenised {self._format_rate()}, into {tokens} tokens{kept}", highlight=False, soft_wrap=True
        )

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.started

    def _format_rate(self) -> str:
        megabytes = self.bytes / 1e6
        return f"{megabytes:.1f} MB at {megabytes / self._seconds:.1f} MB/s"


def _format_duration(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds > 5400
        else f"{seconds / 60:.0f} min"
        if seconds > 90
        else f"{seconds:.0f} s"
    )
