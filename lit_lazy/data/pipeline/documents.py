"""Documents out of text files, JSON lines, parquet and datasets of the Hugging Face Hub, one after the other.

A document is its UTF-8 bytes. At no time more than a document, a parquet row group, or a batch of a streamed dataset is
in memory. Empty documents and nulls are left out. Every error is a one-line ValueError that names option and file.
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
LONGEST_DOCUMENT = 16 * 2**20
# A .txt file of up to WHOLE bytes is one document. In a longer one a document ends at the first blank line, else line
# end, else blank, after PIECE bytes, so that one big file can be split into training and validation text.
WHOLE, PIECE = 64 * 2**10, 16 * 2**10
ROWS_AT_ONCE = 256
HUB_SECONDS = 10.0
MOST_NAMED = 20
SMALL_FILES = 16 * 2**20
"""Files that have so many bytes together are tokenised by one job, whose start would cost more than they."""
HUB_URL = "hf://datasets/"
FAR_SIZE = 2**30
"""What a file counts for that is not here yet, in bytes."""


class Source(Protocol):
    """Where documents come from."""

    @property
    def field(self) -> str:
        """The option that names it, for errors."""
        ...

    @property
    def given(self) -> str:
        """What that option holds."""
        ...

    @property
    def column(self) -> str:
        """Where rows hold the text."""
        ...

    @property
    def size(self) -> int:
        """Bytes of its files."""
        ...

    def split_parts(self) -> "Sequence[Source]":
        """What can be read apart; together, in this order, they are the source."""
        ...

    def read_state(self) -> list[Any]:
        """What names the content."""
        ...

    def documents(self) -> Iterator[bytes]:
        """Every document that is not empty."""
        ...


@dataclass(frozen=True)
class Files:
    """Local files, all documents of which are read in the order of the paths."""

    field: str
    """The option that names them, for errors."""
    given: str
    paths: tuple[Path, ...]
    column: str

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.paths)

    def split_parts(self) -> list["Files"]:
        """The files one by one, but for small ones, of which neighbours stay together."""
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
        """What changes when a file does: each one's path, size in bytes and time of change in ns."""
        return read_file_states(self.paths)

    def documents(self) -> Iterator[bytes]:
        """Every document that is not empty."""
        for path in self.paths:
            try:
                yield from filter(None, self._read(path))
            except OSError as error:
                raise self._error(path, f"cannot be read ({error.strerror or one_line(error)})") from None

    def _read(self, path: Path) -> Iterator[bytes]:
        if path.suffix == ".txt":
            return self._read_text(path)
        if path.suffix == ".parquet":
            return extract_texts(self._read_parquet(path), self.column, f"{self.field}={str(path)!r}")
        return self._read_json_lines(path)

    def _read_text(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            ahead = file.read(WHOLE + 1)
            is_whole, offset = len(ahead) <= WHOLE, 0
            while ahead:
                end = len(ahead) if is_whole else find_piece_end(ahead)
                yield self._check_text(ahead[:end], path, offset)
                offset += end
                ahead = ahead[end:] + file.read(end)

    def _read_json_lines(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            offset, number = 0, 0
            while line := file.readline(LONGEST_DOCUMENT + 1):
                number += 1
                if len(line) > LONGEST_DOCUMENT:
                    raise self._error(
                        path, f"line {number} is longer than {LONGEST_DOCUMENT >> 20} MiB; split that document"
                    )
                text = self._check_text(line, path, offset).strip()
                if text:
                    yield self._parse_json_line(text, path, number)
                offset += len(line)

    def _parse_json_line(self, line: bytes, path: Path, number: int) -> bytes:
        """The text in one JSON line."""
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
            f"{where} has only {format_names(row)}; name one that holds text",
        )
        value = row[self.column]
        require(
            value is None or isinstance(value, str),
            "data.column",
            self.column,
            f"must hold text; {where} has {json.dumps(value)[:40]}",
        )
        try:
            return (value or "").encode()
        except UnicodeEncodeError as error:
            raise self._error(path, f"line {number} is not text ({one_line(error)}); repair it") from None

    def _read_parquet(self, path: Path) -> Iterator[Any]:
        datasets = import_datasets_quietly()
        name = glob.escape(str(path))
        try:
            # Unless told, it reads as many rows at a time as the row group has, and fails at one without any.
            whole = datasets.load_dataset(
                "parquet", data_files=[name], split="train", streaming=True, batch_size=ROWS_AT_ONCE
            )
            # By row groups: the reader of a whole file decodes it into memory as fast as it can, however slowly its
            # tables are taken.
            yield from tables(whole.reshard())
        except (ValueError, NotImplementedError, OSError) as error:
            raise self._error(path, f"is not whole, readable parquet ({one_line(error)})") from None

    def _check_text(self, raw: bytes, path: Path, offset: int) -> bytes:
        """`raw`, which begins at byte `offset` of the file, if it is text."""
        if (at := raw.find(b"\0")) >= 0:
            raise self._error(path, f"holds a NUL byte at byte {offset + at}, so it is no text; give a text file")
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(path, f"is not UTF-8 at byte {offset + error.start}; convert it to UTF-8") from None
        return raw

    def _error(self, path: Path, text: str) -> ValueError:
        return ValueError(f"{self.field}={str(path)!r}: {text}")


@dataclass(frozen=True)
class Hub:
    """One split of a dataset of the Hugging Face Hub, or of a folder laid out like one."""

    name: str
    config: str | None
    revision: str | None
    split: str
    column: str
    stream: bool

    @property
    def field(self) -> str:
        """The option that names it, for errors."""
        return "data.hub"

    @property
    def given(self) -> str:
        """What that option holds."""
        return self.name

    @property
    def size(self) -> int:
        """Bytes; of a dataset that is read whole not known, and so great that nothing is called small beside it."""
        return FAR_SIZE

    def split_parts(self) -> Sequence[Source]:
        """Its parquet files one by one; what is streamed, or in another format, is read whole by `datasets`."""
        if self.stream:
            return [self]
        found = self._list_files()
        if not all(path.endswith(".parquet") for path in found):
            return [self]
        if far := [HubFile.from_address(path, self.name, self.column) for path in found if path.startswith(HUB_URL)]:
            return far if len(far) == len(found) else [self]
        return [Files(self.field, self.name, (Path(path),), self.column) for path in found] or [self]

    def _list_files(self) -> list[str]:
        """Paths or addresses of the files of the split, as the dataset's own listing has them; none where it is
        unknown: then `datasets` says why."""
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
        """What names the content: for a folder its files, otherwise the name alone, which needs no network."""
        paths = (
            sorted(path for path in Path(self.name).rglob("*") if path.is_file()) if os.path.isdir(self.name) else []
        )
        return [self.name, self.config, self.revision, self.split, read_file_states(tuple(paths))]

    def documents(self) -> Iterator[bytes]:
        """Every document that is not empty."""
        return filter(None, extract_texts(self._tables(), self.column, f"data.hub={self.name!r}"))

    def _tables(self) -> Iterator[Any]:
        datasets = import_datasets_quietly()
        self._check_hub()
        try:
            found = datasets.load_dataset(
                self.name, self.config, split=self.split, revision=self.revision, streaming=self.stream
            )
            yield from tables(found.to_iterable_dataset() if isinstance(found, datasets.Dataset) else found)
        except (OSError, ValueError, NotImplementedError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            wraps = isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__
            raise make_unreadable_error(self.name, wraps or error) from None


@dataclass(frozen=True)
class HubFile:
    """A parquet file of a dataset of the Hugging Face Hub, kept in the Hub's own cache once it is downloaded."""

    name: str
    commit: str
    path: str
    column: str

    @property
    def field(self) -> str:
        """The option that names its dataset, for errors."""
        return "data.hub"

    @property
    def size(self) -> int:
        """Bytes; not known before it is here, and so great that nothing is called small beside it."""
        return FAR_SIZE

    @property
    def given(self) -> str:
        """What that option holds."""
        return self.name

    @classmethod
    def from_address(cls, address: str, name: str, column: str) -> "HubFile":
        """From an address such as hf://datasets/NAME@COMMIT/PATH."""
        commit, _, path = re.sub(f"^{HUB_URL}[^@]*@", "", address).partition("/")
        return cls(name, commit, path, column)

    def split_parts(self) -> list["HubFile"]:
        """Itself."""
        return [self]

    def read_state(self) -> list[Any]:
        """What names the content."""
        return [self.name, self.commit, self.path]

    def documents(self) -> Iterator[bytes]:
        """Every document that is not empty; the file is downloaded before the first."""
        huggingface_hub.utils.disable_progress_bars()
        try:
            path = huggingface_hub.hf_hub_download(self.name, self.path, repo_type="dataset", revision=self.commit)
        except (OSError, ValueError, RuntimeError) as error:
            raise make_unreadable_error(self.name, error) from None
        return Files(self.field, self.name, (Path(path),), self.column).documents()


def make_unreadable_error(name: str, error: BaseException) -> ValueError:
    """What is said of a dataset of the Hub that cannot be had."""
    return ValueError(
        f"data.hub={name!r}: cannot be read ({one_line(error)}); check name, data.hub_config, "
        "data.split, data.revision and the network, or give data.path"
    )


def go_offline_unless_hub_answers() -> None:
    """Where it does not, its client would try for half a minute; what is in its cache is read all the same."""
    config = import_datasets_quietly().config
    if not (huggingface_hub.constants.HF_HUB_OFFLINE or config.HF_HUB_OFFLINE or is_hub_reachable()):
        huggingface_hub.constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True


def is_hub_reachable() -> bool:
    """Whether the Hub answers within seconds, be it with an error."""
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
    """The datasets library, imported late because it takes a second."""
    import datasets

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each of its attempts
    # Its readers log each error in several lines before they raise it.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets


def tables(dataset: Any) -> Iterator[Any]:
    """Arrow tables of a few hundred rows each."""
    return dataset.with_format("arrow").iter(ROWS_AT_ONCE)


def extract_texts(found: Iterator[Any], column: str, where: str) -> Iterator[bytes]:
    """The texts in one column of Arrow tables, as UTF-8."""
    for table in found:
        names = table.column_names
        require(
            column in names, "data.column", column, f"{where} has only {format_names(names)}; name one that holds text"
        )
        kind = str(table.schema.field(column).type)
        require("string" in kind and "<" not in kind, "data.column", column, f"must hold text; in {where} it is {kind}")
        for value in table.column(column).to_pylist():
            text = (value or "").encode()
            if len(text) > LONGEST_DOCUMENT:
                raise ValueError(
                    f"{where}: a document is longer than {LONGEST_DOCUMENT >> 20} MiB ({text[:40]!r}...); split it"
                )
            yield text


def format_names(names: Collection[str]) -> str:
    """Some names, to choose one from."""
    return ", ".join([*itertools.islice(names, MOST_NAMED), *["..."][: len(names) - MOST_NAMED]]) or "no columns"


def find_piece_end(ahead: bytes) -> int:
    """Where the document at the start of `ahead` ends."""
    if len(ahead) <= PIECE:
        return len(ahead)
    for mark in (b"\n\n", b"\n", b" "):
        if (found := ahead.find(mark, PIECE)) >= 0:
            return found + len(mark)
    if len(ahead) <= WHOLE:
        return len(ahead)
    # Not inside a character, of which all bytes but the first begin with the bits 10.
    last = len(ahead) - 1
    return next((at for at in range(last, last - 4, -1) if ahead[at] & 0xC0 != 0x80), last)


def find_files(field: str, given: str) -> tuple[Path, ...]:
    """The files that a path, a folder (with those below it) or a glob means, in the order of their paths."""
    try:
        at = Path(given).expanduser()
        at.stat()
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, links in a circle, an unknown user
        raise ValueError(f"{field}={given!r}: {getattr(error, 'strerror', None) or error}; name another") from None
    if at.is_dir():
        inside = [path for path in at.rglob("*") if not any(p.startswith(".") for p in path.relative_to(at).parts)]
        found = [path for path in inside if path.suffix in FORMATS and path.is_file()]
        kinds = sorted({path.suffix for path in found})
        require(bool(found), field, given, f"no {', '.join(FORMATS)} file in that folder")
        require(len(kinds) == 1, field, given, f"holds {' and '.join(kinds)} files; choose by a glob, as in 'x/*.txt'")
    elif at.is_file():
        found = [at]
    else:
        found = [Path(name) for name in glob.glob(str(at), recursive=True) if Path(name).is_file()]
        require(bool(found), field, given, "no such file or folder, and no file matches it as a glob")
    for path in found:
        require(path.suffix in FORMATS, field, str(path), f"unknown kind of file; known are {', '.join(FORMATS)}")
    require(any(path.stat().st_size for path in found), field, given, "is empty; give files with text")
    # Not resolved: in the Hub's own cache files are links to nameless ones.
    return tuple(sorted(Path(os.path.abspath(path)) for path in found))


def read_file_states(paths: tuple[Path, ...]) -> list[tuple[str, int, int]]:
    """Path, size in bytes and time of change in ns of each file."""
    return [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths]
