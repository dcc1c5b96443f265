"""Cache of tokenised corpora, memory-mapped when opened.

A corpus is a folder with `train.bin`, `validation.bin` (the tokens, in the smallest unsigned type that holds the
vocabulary), `train.ends`, `validation.ends` (end offset of each document, int64), `corpus.json` (metadata with digests)
and, for a part of more than WHOLE_BYTES, `train.sha256` (a digest of each block of BLOCK_BYTES, 32 bytes each). It is
joined from the shards of its files (`lit_lazy.data.pipeline.shards`), which stay in the cache until it is complete. It
appears by an atomic rename under a lock: concurrent processes make the same corpus once. A killed process leaves
finished shards, which the next one reuses, and `.partial` folders and files, which the next one replaces.
"""

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lit_lazy.data import list_doubts
from lit_lazy.data.pipeline.shards import FileJob, Piece, Shard, find_or_make_shard, lock, remove_shard, select_held_out
from lit_lazy.data.pipeline.workers import choose_process_count, make_shards
from lit_lazy.support.console import format_count, plain_console
from lit_lazy.support.disk import quarantine, write_atomically, write_text
from lit_lazy.support.error_messages import explain, one_line

FACTS = "corpus.json"
PARTS = ("train", "validation")
WHOLE_BYTES = 2**30
"""Tokens of a part, in bytes, up to which it is checked as a whole when a process opens it, in 1 to 2 seconds. Of a
larger one each block is checked before its first use."""
BLOCK_BYTES = 2**20
"""Small, because the first batches of a training use as many blocks as windows."""
NO_LIMIT = 2**63 - 1
ATTEMPTS = 3
"""Attempts to read a shard that is damaged, or that another corpus of the same files has removed."""


class Corpus:
    """Tokens of an intact corpus, memory-mapped from its cache folder, and its metadata."""

    def __init__(self, folder: Path) -> None:
        """Reads only the metadata."""
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        self.folder = folder
        self.train, self.validation = (np.memmap(folder / f"{part}.bin", facts["dtype"], mode="c") for part in PARTS)
        """Unsigned `[n]`: the concatenated documents, each followed by the separator."""
        self.vocab_size: int = facts["vocab_size"]
        self.fingerprint: str = facts["fingerprint"]
        """Digest of the vocabulary size and all tokens."""
        self.train_documents, self.validation_documents = facts["documents"]
        self.bytes_per_token: float = facts["bytes_per_token"]
        """Over the validation documents. A separator counts as one token and one byte, like NUL in byte tokens; a begin
        token counts as one token and no byte."""
        self.validation_overlap: float = facts["validation_overlap"]
        """Share of the documents of a separate validation text that the training text has too."""
        self.lossy_documents: float = facts["lossy_documents"]
        """Share of a sample of the documents that decoding their tokens does not restore."""
        self.digests = {path.stem: np.fromfile(path, np.uint8).reshape(-1, 32) for path in folder.glob("*.sha256")}
        """Of the blocks of each part that was not checked as a whole."""
        self.unchecked = {part: {*range(len(digests))} for part, digests in self.digests.items()}

    def check(self, part: str, starts: np.ndarray, length: int) -> None:
        """Check what was not checked yet of the `length` tokens after each of `starts` `[n]`, before their use.

        Raises a one-line ValueError if a block is damaged; the corpus is then in quarantine.
        """
        if part not in self.unchecked:
            return
        tokens = getattr(self, part)
        size = BLOCK_BYTES // tokens.itemsize
        spans = zip(starts // size, (starts + length - 1) // size, strict=True)
        for block in {number for first, last in spans for number in range(first, last + 1)} & self.unchecked[part]:
            content = tokens[block * size : (block + 1) * size].tobytes()
            if hashlib.sha256(content).digest() != self.digests[part][block].tobytes():
                with contextlib.suppress(FileNotFoundError):  # another process found it too
                    quarantine(self.folder, f"block {block} of its tokens differs from its digest")
                where = f"LIT_LAZY_CACHE={str(self.folder.parent)!r}: its folder {self.folder.name}"
                raise ValueError(f"{where} is damaged; run again to tokenise it anew")
            self.unchecked[part].remove(block)

    def ends(self, part: str) -> np.ndarray:
        """End offset of each document of a part, including its separator: int64 `[documents]`, memory-mapped."""
        return np.memmap(self.folder / f"{part}.ends", np.int64, mode="c")


def cache_folder() -> Path:
    """Folder of the cached corpora: `LIT_LAZY_CACHE`, by default `~/.cache/lit-lazy/tokens`."""
    setting = os.environ.get("LIT_LAZY_CACHE") or "~/.cache/lit-lazy/tokens"
    problem = f"LIT_LAZY_CACHE={setting!r}: cannot be used"
    with explain(problem, "set it to another folder", OSError, RuntimeError):  # a name too long, an unknown user
        folder = Path(setting).expanduser()
        folder.exists()
    return folder


def is_intact(folder: Path) -> bool:
    """Whether a corpus exists and matches its digests; reads it once per process."""
    return folder.exists() and not find_damage(folder, read_stamp(folder))


def read_stamp(folder: Path) -> tuple[int, int]:
    """Distinguishes a corpus from one that was made anew in its place."""
    state = folder.stat()
    return state.st_ino, state.st_mtime_ns


@functools.cache
def find_damage(folder: Path, stamp: tuple[int, int]) -> str:  # noqa: ARG001
    """What differs in a corpus from its digests; "" if nothing. Parts with digests of blocks count as intact.

    Raises a one-line ValueError if the corpus cannot be read.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        width = np.dtype(facts["dtype"]).itemsize
        sizes = [(folder / f"{part}.bin").stat().st_size for part in PARTS]
        if sizes != [tokens * width for tokens in facts["tokens"]]:
            return "its number of tokens is wrong"
        digests = [_digest_part(folder, part, facts) for part in PARTS]
        if make_fingerprint(facts["vocab_size"], digests) != facts["fingerprint"]:
            return "its tokens differ from their digest"
        if [_digest_file(folder / f"{part}.ends") for part in PARTS] != facts["ends"]:
            return "its document ends differ from their digest"
    except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError) as error:
        return f"is incomplete ({one_line(error)})"
    except OSError as error:
        raise ValueError(
            f"LIT_LAZY_CACHE={str(folder.parent)!r}: its folder {folder.name} cannot be read "
            f"({error.strerror or one_line(error)}); make it readable, or set another folder"
        ) from None
    return ""


def _digest_part(folder: Path, part: str, facts: Mapping[str, Any]) -> str:
    """sha256 of a part's type and tokens: of the file, or as recorded if its blocks are checked later."""
    tokens, blocks = folder / f"{part}.bin", folder / f"{part}.sha256"
    if not blocks.exists():
        return _digest_file(tokens, facts["dtype"].encode())
    if blocks.stat().st_size != ceil(tokens.stat().st_size / BLOCK_BYTES) * hashlib.sha256().digest_size:
        raise ValueError(f"wrong size of {blocks.name}")
    return facts["digests"][PARTS.index(part)]


def _digest_file(path: Path, prefix: bytes = b"") -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.sha256(prefix)).hexdigest()


def make_fingerprint(vocab_size: int, digests: Sequence[str]) -> str:
    return hashlib.sha256(" ".join([str(vocab_size), *digests]).encode()).hexdigest()[:16]


def make_once(
    folder: Path, fill: Callable[[Path], None], damage_of: Callable[[Path, tuple[int, int]], str] = find_damage
) -> None:
    """Let `fill` write the folder, unless it is intact or another process makes it meanwhile.

    damage_of: finds what is damaged in the folder of a given stamp, "" if nothing. A damaged one is quarantined. Raises
    ValueError if the cache cannot be written. After any error, nothing of the folder is left behind; the cache around
    it stays, because another process may be waiting for its lock there.
    """
    root, fix = folder.parent, "set it to a writable folder with free space"
    with explain(f"LIT_LAZY_CACHE={str(root)!r}: cannot be written", fix, OSError):
        root.mkdir(parents=True, exist_ok=True)
        with lock(root / f"{folder.name}.lock"):
            if folder.exists() and (damage := damage_of(folder, read_stamp(folder))):
                quarantine(folder, damage)
            if not folder.exists():
                _make_folder(folder, fill)


def _make_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    if not (partial / FACTS).exists():  # FACTS is written last
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
    try:
        partial.mkdir(exist_ok=True)
        fill(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@dataclass(frozen=True)
class CorpusPlan:
    """Files to tokenise, in order, and how they are split."""

    train: Sequence[FileJob]
    validation: Sequence[FileJob]
    """Empty if a share of the training documents is held out."""
    vocab_size: int
    validation_share: float


def write_corpus(folder: Path, plan: CorpusPlan, processes: int | None, check: Callable[[], object]) -> None:
    """Tokenise documents into a folder, which may already hold the corpus.

    Without validation documents, a share of the training documents is held out. The training part and the validation
    documents are cut at the limit of their jobs; reading stops there.
    check: called before the corpus counts as complete. Raises ValueError if a part gets no document.
    """
    shards = folder.parent
    jobs = [*plan.validation, *plan.train]
    if not (folder / FACTS).exists():
        meter = _Meter(jobs, shards)
        with meter.progress:
            facts = _join(folder, plan, shards, processes, meter)
        if not all(facts["documents"]):
            _remove_shards(jobs, shards)
            raise _make_empty_error(facts["documents"], plan.validation_share)
        check()
        write_text(folder / FACTS, json.dumps(facts))
        meter.report(facts)
    _remove_shards(jobs, shards)


def _remove_shards(jobs: Iterable[FileJob], shards: Path) -> None:
    for job in jobs:
        remove_shard(shards, job.name)


def _make_empty_error(documents: Sequence[int], share: float) -> ValueError:
    there, empty = sum(documents), "validation" if documents[0] else "training"
    problem = f"data.validation_share={share}: of {format_count(there, 'document')} none is for {empty}"
    # A document is never divided, so no share would help with one.
    fix = "choose a larger share, give more documents" if there > 1 else "divide the text into more files"
    return ValueError(f"{problem}; {fix}, or set data.validation")


def _join(folder: Path, plan: CorpusPlan, shards: Path, processes: int | None, meter: "_Meter") -> dict[str, Any]:
    """Write the parts of the corpus as the shards arrive; returns the metadata."""
    dtype, sampled, lossy = np.min_scalar_type(plan.vocab_size - 1), 0, 0
    known: Counter[int] = Counter()  # hashes of the documents of a separate validation text
    shared: set[int] = set()  # those that the training text has too
    with (
        _PartWriter(folder, "train", dtype, plan.train, lambda hashes: shared.update(known.keys() & hashes)) as train,
        _PartWriter(folder, "validation", dtype, plan.validation, known.update) as validation,
    ):
        for part in (validation, train):
            count = choose_process_count(part.jobs, processes)
            with closing(make_shards(part.jobs, shards, count, meter.count)) as found:
                for job, shard in zip(part.jobs, found, strict=False):
                    intact, file = _open_intact(shard, job, shards, meter)
                    with file:
                        _append(intact.pieces(file), part, validation, job.share)
                    meter.count_file()
                    sampled, lossy = sampled + intact.sampled, lossy + intact.lossy
                    if part.is_full:
                        break
    digests = [train.digest.hexdigest(), validation.digest.hexdigest()]
    return {
        "dtype": dtype.str,
        "vocab_size": plan.vocab_size,
        "fingerprint": make_fingerprint(plan.vocab_size, digests),
        "digests": digests,
        "ends": [train.ends_digest.hexdigest(), validation.ends_digest.hexdigest()],
        "tokens": [train.tokens, validation.tokens],
        "documents": [train.documents, validation.documents],
        "bytes_per_token": validation.bytes_per_token,
        "validation_overlap": sum(known[number] for number in shared) / max(known.total(), 1),
        "lossy_documents": lossy / max(sampled, 1),
    }


def _open_intact(shard: Shard, job: FileJob, shards: Path, meter: "_Meter") -> tuple[Shard, BinaryIO]:
    """The shard and its open file, made again if it is damaged or has been removed."""
    for _ in range(ATTEMPTS):
        if (file := shard.open_intact()) is not None:
            return shard, file
        meter.log(f"a shard of {job.source.given} in {shards} is damaged; tokenising it again")
        shard.remove()
        shard = find_or_make_shard(job, shards, meter.count)
    raise OSError(errno.EIO, "shards read back differ from what was written")


def _append(pieces: Iterable[Piece], part: "_PartWriter", held_out: "_PartWriter", share: float) -> None:
    """Add a shard's documents to `part`, until it is full, and the held-out share to `held_out`."""
    for piece in pieces:
        is_held_out = select_held_out(piece.hashes, share)
        reached = part.tokens + np.cumsum(np.where(is_held_out, 0, piece.lengths)) >= part.limit
        read = np.arange(len(reached)) <= (int(reached.argmax()) if reached.any() else len(reached))
        part.add(piece.select(read & ~is_held_out))
        if share:
            held_out.add(piece.select(read & is_held_out))
        if part.is_full:
            return


class _PartWriter:
    """Writes the files of tokens and of document ends of one part, and counts; `observe` is given the hashes.

    jobs: empty if the part is a share of the other's documents, which are then not observed.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        dtype: np.dtype[Any],
        jobs: Sequence[FileJob],
        observe: Callable[[Sequence[int]], object],
    ) -> None:
        self.jobs, self.observe, self.dtype = jobs, observe, dtype
        self.limit = NO_LIMIT if not jobs or jobs[0].limit is None else jobs[0].limit
        self.path = folder / f"{name}.bin"
        self.files = [self.path.with_suffix(suffix).open("wb") for suffix in (".bin", ".ends")]
        self.digest, self.ends_digest = hashlib.sha256(dtype.str.encode()), hashlib.sha256()
        self.tokens = self.documents = 0
        # Of complete documents; the limit may cut `tokens` inside one.
        self._bytes = self._whole_tokens = 0

    def __enter__(self) -> "_PartWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            with file:
                file.flush()
                os.fsync(file.fileno())
        if self.path.stat().st_size > WHOLE_BYTES:
            with self.path.open("rb") as file:
                digests = [hashlib.sha256(block).digest() for block in iter(lambda: file.read(BLOCK_BYTES), b"")]
            write_atomically(self.path.with_suffix(".sha256"), lambda written: written.write(b"".join(digests)))

    @property
    def is_full(self) -> bool:
        return self.tokens >= self.limit

    @property
    def bytes_per_token(self) -> float:
        return (self._bytes + self.documents) / max(self._whole_tokens, 1)

    def add(self, piece: Piece) -> None:
        """Write documents up to the limit."""
        if self.jobs:
            self.observe(piece.hashes.tolist())
        ends = self.tokens + np.cumsum(piece.lengths, dtype=np.int64)
        written = piece.tokens[: self.limit - self.tokens]
        raw = written.astype(self.dtype, copy=False).tobytes()
        tokens, ends_file = self.files
        tokens.write(raw)
        self.digest.update(raw)
        self.tokens += len(written)
        raw_ends = np.minimum(ends, self.tokens).tobytes()
        ends_file.write(raw_ends)
        self.ends_digest.update(raw_ends)
        self.documents += len(ends)
        self._bytes += int(piece.bytes.sum())
        self._whole_tokens += len(piece.tokens)


class _Meter:
    """Progress bar on a terminal, and a final line with the speed."""

    def __init__(self, jobs: Sequence[FileJob], shards: Path) -> None:
        self.console = plain_console(stderr=True)
        text = TextColumn("{task.description}")
        columns = SpinnerColumn(), text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self.progress = Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("tokenising", total=None)
        self.files, self.limit, self.lock = len(jobs), jobs[0].limit, threading.Lock()
        self.reused = sum(Shard.find(shards, job.name) is not None for job in jobs)
        self.started = time.monotonic()
        self.bytes = self.tokens = self.joined = 0

    def count(self, size: int, tokens: int) -> None:
        """Add bytes of text and training tokens; thread-safe."""
        with self.lock:
            self.bytes, self.tokens = self.bytes + size, self.tokens + tokens
            done, total = (self.joined, self.files) if self.limit is None else (self.tokens, self.limit)
            files = f", {self.joined} of {self.files} parts" if self.files > 1 else ""
            shown = f"tokenising, {self._format_rate()}{files}"
            self.progress.update(self.task, completed=done, total=total if done else None, description=shown)

    def count_file(self) -> None:
        with self.lock:
            self.joined += 1

    def log(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def report(self, facts: Mapping[str, Any]) -> None:
        """Print the speed, the number of tokens, and what makes figures on this corpus doubtful."""
        reused = f", {self.reused} parts reused" if self.reused else ""
        self.log(f"tokenised {self._format_rate()}, into {sum(facts['tokens'])} tokens{reused}")
        for line in list_doubts(facts):
            self.log(line)

    def _format_rate(self) -> str:
        megabytes = self.bytes / 1e6
        return f"{megabytes:.1f} MB at {megabytes / (time.monotonic() - self.started):.1f} MB/s"
