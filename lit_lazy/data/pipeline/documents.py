"""Iterators over the documents of text files, JSON lines, parquet and datasets of the Hugging Face Hub.

A document is its UTF-8 bytes. Memory holds at most one document, one parquet row group, or one batch of a streamed
dataset. Empty documents and nulls are skipped. Every error is a one-line ValueError that names option and file.
"""

import dataclasses
import glob
import itertools
import json
import logging
import os
import re
import sys
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.error import HTTPError

import huggingface_hub

from lit_lazy.support.checks import require
from lit_lazy.support.errors import one_line
from lit_lazy.support.timeout import call_with_timeout

FORMATS = (".txt", ".jsonl", ".json", ".parquet")
# A tokeniser needs about a hundred times the memory of a document.
MAX_DOCUMENT_BYTES = 16 * 2**20
# A .txt file of up to MAX_UNSPLIT bytes is one document. In a longer one a document ends at the first blank line, else
# line end, else space, after MIN_PIECE bytes, so that one big file can be split into training and validation text.
MAX_UNSPLIT, MIN_PIECE = 64 * 2**10, 16 * 2**10
ROWS_AT_ONCE = 256
HUB_SECONDS = 10.0
PATIENCE = 60.0
"""Seconds for the answer of a Hub that was reachable: the library's 10 were once too few on a busy machine."""
MAX_NAMES = 20
SMALL_FILES = 16 * 2**20
"""Neighbouring files of up to this many bytes in total share one job: starting a job costs more than such files."""
HUB_URL = "hf://datasets/"
UNKNOWN_SIZE = 2**30
"""Assumed size in bytes of a file that is not yet downloaded; large enough to be worth a process."""


class Source(Protocol):
    """Source of documents."""

    @property
    def field(self) -> str:
        """The option that names it, for errors."""
        ...

    @property
    def given(self) -> str:
        """Value of that option."""
        ...

    @property
    def column(self) -> str:
        """Column with the text."""
        ...

    @property
    def size(self) -> int:
        """Total size of its files in bytes."""
        ...

    def split_parts(self) -> "Sequence[Source]":
        """Parts that can be read independently; in this order they make up the source."""
        ...

    def read_state(self) -> list[Any]:
        """JSON-serialisable identity of the content."""
        ...

    def documents(self) -> Iterator[bytes]:
        """Documents, without empty ones."""
        ...


@dataclass(frozen=True)
class Files:
    """Local files, read in the order of their paths."""

    field: str
    given: str
    paths: tuple[Path, ...]
    column: str

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def split_parts(self) -> list["Files"]:
        """One part per file, except that small neighbouring files stay together."""
        groups: list[list[Path]] = []
        room = 0
        for path in self.paths:
            size = path.stat().st_size
            if size > room:
                groups.append([])
                room = SMALL_FILES
            groups[-1].append(path)
            room -= size
        return [dataclasses.replace(self, paths=tuple(group)) for group in groups]

    def read_state(self) -> list[tuple[str, int, int]]:
        return read_file_states(self.paths)

    def documents(self) -> Iterator[bytes]:
        for path in self.paths:
            try:
                yield from filter(None, self._read(path))
            except OSError as error:
                raise self._error(
                    path, f"cannot be read ({error.strerror or one_line(error)}); check the file"
                ) from None

    def _read(self, path: Path) -> Iterator[bytes]:
        if path.suffix in (".txt", ".py"):
            return self._read_text(path)
        if path.suffix == ".parquet":
            return extract_texts(self._read_parquet(path), self.column, f"{self.field}={str(path)!r}")
        return self._read_json_lines(path)

    def _read_text(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            buffer = file.read(MAX_UNSPLIT + 1)
            is_whole, offset = len(buffer) <= MAX_UNSPLIT, 0
            while buffer:
                end = len(buffer) if is_whole else find_piece_end(buffer)
                yield self._check_text(buffer[:end], path, offset)
                offset += end
                buffer = buffer[end:] + file.read(end)

    def _read_json_lines(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            offset, number = 0, 0
            while line := file.readline(MAX_DOCUMENT_BYTES + 1):
                number += 1
                if len(line) > MAX_DOCUMENT_BYTES:
                    raise self._error(
                        path, f"line {number} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB; split that document"
                    )
                text = self._check_text(line, path, offset).strip()
                if text:
                    yield self._parse_json_line(text, path, number)
                offset += len(line)

    def _parse_json_line(self, line: bytes, path: Path, number: int) -> bytes:
        where = f"line {number} of {str(path)!r}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._error(
                path, f"line {number} is not JSON ({one_line(error)}); give one object per line"
            ) from None
        if not isinstance(row, dict):
            raise self._error(path, f"line {number} is a JSON {type(row).__name__}; give one object per line")
        require(
            self.column in row,
            "data.column",
            self.column,
            f"{where} has only {format_names(row)}; choose one with text",
        )
        value = row[self.column]
        require(
            value is None or isinstance(value, str),
            "data.column",
            self.column,
            f"{where} has {json.dumps(value)[:40]} there; choose a column with text",
        )
        try:
            return (value or "").encode()
        except UnicodeEncodeError as error:
            raise self._error(path, f"line {number} is not valid Unicode ({one_line(error)}); correct it") from None

    def _read_parquet(self, path: Path) -> Iterator[Any]:
        datasets = import_datasets_quietly()
        name = glob.escape(str(path))
        try:
            # Without batch_size, it reads row groups as a whole and fails at an empty one.
            dataset = datasets.load_dataset(
                "parquet", data_files=[name], split="train", streaming=True, batch_size=ROWS_AT_ONCE
            )
            # By row groups: the reader of a complete file decodes it into memory regardless of how fast its tables are
            # consumed.
            yield from iterate_tables(dataset.reshard())
        except (ValueError, NotImplementedError, OSError) as error:
            raise self._error(path, f"is incomplete or damaged parquet ({one_line(error)}); replace the file") from None

    def _check_text(self, raw: bytes, path: Path, offset: int) -> bytes:
        """Return `raw`, which starts at byte `offset` of the file. Raises ValueError if it is not UTF-8 text."""
        if (nul := raw.find(b"\0")) >= 0:
            raise self._error(path, f"has a NUL at byte {offset + nul}, so it is not text; give a text file")
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(path, f"is not UTF-8 at byte {offset + error.start}; convert it to UTF-8") from None
        return raw

    def _error(self, path: Path, text: str) -> ValueError:
        return ValueError(f"{self.field}={str(path)!r}: {text}")


@dataclass(frozen=True)
class Hub:
    """One split of a dataset of the Hugging Face Hub, or of a folder with the same layout."""

    name: str
    config: str | None
    revision: str | None
    split: str
    column: str
    stream: bool

    @property
    def field(self) -> str:
        return "data.hub"

    @property
    def given(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        return UNKNOWN_SIZE

    def split_parts(self) -> Sequence[Source]:
        """One part per parquet file; a streamed dataset, or another format, is one part that `datasets` reads."""
        if self.stream:
            return [self]
        paths = self._list_files()
        if not all(path.endswith(".parquet") for path in paths):
            return [self]
        remote = [HubFile.from_address(path, self.name, self.column) for path in paths if path.startswith(HUB_URL)]
        if remote:
            return remote if len(remote) == len(paths) else [self]
        return [Files(self.field, self.name, (Path(path),), self.column) for path in paths] or [self]

    def _list_files(self) -> list[str]:
        """Paths or URLs of the split's files as the dataset lists them; empty if it cannot be read (reading it then
        raises the error)."""
        datasets = import_datasets_quietly()
        self._check_hub()
        try:
            builder = datasets.load_dataset_builder(self.name, self.config, revision=self.revision)
        except (OSError, ValueError, NotImplementedError, RuntimeError, datasets.exceptions.DatasetsError):
            return []
        return [str(path) for path in (builder.config.data_files or {}).get(self.split, [])]

    def _check_hub(self) -> None:
        if not os.path.isdir(self.name):
            go_offline_unless_hub_answers()

    def read_state(self) -> list[Any]:
        """Identity of the content: the name, which needs no network; for a folder its files too."""
        paths = (
            sorted(path for path in Path(self.name).rglob("*") if path.is_file()) if os.path.isdir(self.name) else []
        )
        return [self.name, self.config, self.revision, self.split, read_file_states(tuple(paths))]

    def documents(self) -> Iterator[bytes]:
        return filter(None, extract_texts(self._tables(), self.column, f"data.hub={self.name!r}"))

    def _tables(self) -> Iterator[Any]:
        datasets = import_datasets_quietly()
        self._check_hub()
        try:
            found = datasets.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, streaming=self.stream
            )
            yield from iterate_tables(found.to_iterable_dataset() if isinstance(found, datasets.Dataset) else found)
        except (OSError, ValueError, NotImplementedError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            wraps = isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__
            raise make_unreadable_error(self.name, wraps or error) from None


@dataclass(frozen=True)
class HubFile:
    """Parquet file of a Hugging Face Hub dataset; the download stays in the cache of the Hub client."""

    name: str
    commit: str
    path: str
    column: str

    @property
    def field(self) -> str:
        return "data.hub"

    @property
    def given(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        return UNKNOWN_SIZE

    @classmethod
    def from_address(cls, address: str, name: str, column: str) -> "HubFile":
        """Parse a URL such as hf://datasets/NAME@COMMIT/PATH."""
        commit, _, path = re.sub(f"^{HUB_URL}[^@]*@", "", address).partition("/")
        return cls(name, commit, path, column)

    def split_parts(self) -> list["HubFile"]:
        return [self]

    def read_state(self) -> list[Any]:
        return [self.name, self.commit, self.path]

    def documents(self) -> Iterator[bytes]:
        """Documents, without empty ones; downloads the file first."""
        huggingface_hub.utils.disable_progress_bars()
        try:
            path = huggingface_hub.hf_hub_download(
                self.name, self.path, repo_type="dataset", revision=self.commit, etag_timeout=PATIENCE
            )
        except (OSError, ValueError, RuntimeError) as error:
            # Where the Hub did not answer, the library's message names no cause.
            raise make_unreadable_error(self.name, error.__cause__ or error) from None
        return Files(self.field, self.name, (Path(path),), self.column).documents()


def make_unreadable_error(name: str, error: BaseException) -> ValueError:
    return ValueError(
        f"data.hub={name!r}: cannot be read ({one_line(error)}); check the name, data.hub_config, "
        "data.split, data.revision and the network, or use data.path"
    )


def go_offline_unless_hub_answers() -> None:
    """Avoids half a minute of retries without a network; cached data are still read."""
    config = import_datasets_quietly().config
    if not (huggingface_hub.constants.HF_HUB_OFFLINE or config.HF_HUB_OFFLINE or is_hub_reachable()):
        huggingface_hub.constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True


def is_hub_reachable() -> bool:
    """Whether the Hub answers within HUB_SECONDS, even with an HTTP error."""
    try:
        call_with_timeout(
            HUB_SECONDS, lambda: urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=HUB_SECONDS)
        )
    except HTTPError:
        return True
    except OSError:
        return False
    return True


def import_datasets_quietly() -> Any:
    """Import the datasets library, late because that takes a second."""
    import datasets

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry
    # Its readers log errors in several lines before they raise them.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def iterate_tables(dataset: Any) -> Iterator[Any]:
    """Arrow tables of up to ROWS_AT_ONCE rows."""
    return dataset.with_format("arrow").iter(ROWS_AT_ONCE)


def extract_texts(tables: Iterator[Any], column: str, where: str) -> Iterator[bytes]:
    """Texts in one column of Arrow tables, as UTF-8."""
    for table in tables:
        names = table.column_names
        require(column in names, "data.column", column, f"{where} has only {format_names(names)}; choose one with text")
        kind = str(table.schema.field(column).type)
        is_text = "string" in kind and "<" not in kind
        require(is_text, "data.column", column, f"has type {kind} in {where}; choose a column with text")
        for value in table.column(column).to_pylist():
            text = (value or "").encode()
            if len(text) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{where}: a document is longer than {MAX_DOCUMENT_BYTES >> 20} MiB ({text[:40]!r}...); split it"
                )
            yield text


def format_names(names: Collection[str]) -> str:
    """The first MAX_NAMES names, for an error message."""
    return ", ".join([*itertools.islice(names, MAX_NAMES), *["..."][: len(names) - MAX_NAMES]]) or "no columns"


def find_piece_end(buffer: bytes) -> int:
    """Offset at which the document at the start of `buffer` ends."""
    if len(buffer) <= MIN_PIECE:
        return len(buffer)
    for mark in (b"\n\n", b"\n", b" "):
        if (found := buffer.find(mark, MIN_PIECE)) >= 0:
            return found + len(mark)
    if len(buffer) <= MAX_UNSPLIT:
        return len(buffer)
    # Not inside a character: all its bytes but the first begin with the bits 10.
    last = len(buffer) - 1
    return next((end for end in range(last, last - 4, -1) if buffer[end] & 0xC0 != 0x80), last)


def find_files(field: str, given: str) -> tuple[Path, ...]:
    """Files that a path, a folder (recursively) or a glob selects, sorted by path."""
    try:
        root = Path(given).expanduser()
        root.stat()
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError, ValueError) as error:  # name too long, link loop, unknown user
        raise ValueError(
            f"{field}={given!r}: {getattr(error, 'strerror', None) or error}; choose another path"
        ) from None
    if root.is_dir():
        visible = [path for path in root.rglob("*") if not any(p.startswith(".") for p in path.relative_to(root).parts)]
        found = [path for path in visible if path.suffix in FORMATS and path.is_file()]
        kinds = sorted({path.suffix for path in found})
        require(bool(found), field, given, f"folder has no {', '.join(FORMATS)} file")
        require(len(kinds) == 1, field, given, f"has {' and '.join(kinds)} files; select one kind, as in 'x/*.txt'")
    elif root.is_file():
        found = [root]
    else:
        found = [Path(name) for name in glob.glob(str(root), recursive=True) if Path(name).is_file()]
        require(
            bool(found), field, given, "is no file or folder, and as a glob it matches no file; give text that exists"
        )
    for path in found:
        require(path.suffix in FORMATS, field, str(path), f"unknown file type; give {', '.join(FORMATS)}")
    require(any(path.stat().st_size for path in found), field, given, "is empty; give files with text")
    # Not resolved: in the Hub's cache, files are links to files without a suffix.
    return tuple(sorted(Path(os.path.abspath(path)) for path in found))


def read_file_states(paths: tuple[Path, ...]) -> list[tuple[str, int, int]]:
    """Path, size in bytes and modification time in ns of each file."""
    return [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths]
