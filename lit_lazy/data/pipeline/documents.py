"""Iterators over the documents of text files, JSON lines, parquet and Arrow tables.

A document is its UTF-8 bytes. Memory holds at most one document, one parquet row group, or one batch of a streamed
dataset. Empty documents and nulls are skipped. Every error is a one-line ValueError that names option and file.
"""

import codecs
import dataclasses
import itertools
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from lit_lazy.data.pipeline.files import open_stream, read_file_states, split_suffixes
from lit_lazy.support.checked_fields import require
from lit_lazy.support.error_messages import explain, one_line

# A tokeniser needs about a hundred times the memory of a document.
MAX_DOCUMENT_BYTES = 16 * 2**20
# A text file of up to MAX_UNSPLIT bytes is one document. In a longer one a document ends at the first blank line, else
# line end, else space, after MIN_PIECE bytes, so that one big file can be split into training and validation text.
MAX_UNSPLIT, MIN_PIECE = 64 * 2**10, 16 * 2**10
BLANK_LINE = re.compile(rb"\n[^\S\n]*\n")
ROWS_AT_ONCE = 256
MAX_NAMES = 20
SMALL_FILES = 16 * 2**20
"""Neighbouring files of up to this many bytes in total share one job: starting a job costs more than such files."""
UNKNOWN_SIZE = 2**30
"""Assumed size in bytes of a file that is not yet downloaded; large enough to be worth a process."""


class Document(NamedTuple):
    """A text in UTF-8, and where it was read: option, file and line or row, as an error begins."""

    where: str
    text: bytes


@dataclass(frozen=True)
class Source(ABC):
    """Source of documents, named by an option: `field` with the value `given`. column: that with the text."""

    field: str
    given: str
    column: str

    @property
    def size(self) -> int:
        """Total size of its files in bytes."""
        return UNKNOWN_SIZE

    def split_parts(self) -> "Sequence[Source]":
        """Parts that can be read independently; in this order they make up the source."""
        return [self]

    @abstractmethod
    def read_state(self) -> list[Any]:
        """JSON-serialisable identity of the content."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Documents, without empty ones."""


@dataclass(frozen=True)
class Files(Source):
    """Local files, read in the order of their paths."""

    paths: tuple[Path, ...]
    left_out: str = ""
    """What of the given folder or glob is not read, in words."""
    span: tuple[float, float] = (0.0, 1.0)
    """Where each document is read from and to, as shares of its length."""

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def split_parts(self) -> list["Files"]:
        """One part per file, except that small neighbouring files stay together."""
        groups: list[list[Path]] = []
        room = 0
        for path in self.paths:
            size = path.stat().st_size
            if not groups or size > room:
                groups.append([])
                room = SMALL_FILES
            groups[-1].append(path)
            room -= size
        return [dataclasses.replace(self, paths=tuple(group)) for group in groups]

    def read_state(self) -> list[Any]:
        return [*read_file_states(self.paths), *([self.span] if self.span != (0.0, 1.0) else [])]

    def documents(self) -> Iterator[Document]:
        for path in self.paths:
            where = f"{self.field}={str(path)!r}"
            kind, _ = split_suffixes(path)
            with explain(f"{where}: cannot be read", "check the file", OSError):
                if kind == ".parquet":
                    found = extract_documents(read_parquet(path, self.column, where), self.column, where)
                elif kind in (".json", ".jsonl"):
                    found = read_json_lines(path, self.column, where)
                else:
                    found = read_text(path, where)
                for document in found:
                    first, last = (find_cut(document.text, share) for share in self.span)
                    if first < last:
                        yield document._replace(text=document.text[first:last])


def read_text(path: Path, where: str) -> Iterator[Document]:
    """A text file as a whole, or in pieces if it is longer than MAX_UNSPLIT."""
    with open_stream(path) as file:
        buffer = file.read(MAX_UNSPLIT + 1)
        is_whole, offset = len(buffer) <= MAX_UNSPLIT, 0
        if buffer.startswith(codecs.BOM_UTF8):
            buffer, offset = buffer.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
        while buffer:
            end = len(buffer) if is_whole else find_piece_end(buffer)
            piece = buffer[:end]
            if (nul := piece.find(b"\0")) >= 0:
                raise ValueError(f"{where}: has a NUL at byte {offset + nul}, so it is not text; give a text file")
            decode(piece, f"{where}: the text", offset)
            yield Document(f"{where}: the text from byte {offset}", piece)
            offset += end
            buffer = buffer[end:] + file.read(end)


def read_json_lines(path: Path, column: str, where: str) -> Iterator[Document]:
    """The text in one field of each line's object."""
    with open_stream(path) as file:
        for number in itertools.count(1):
            if not (line := file.readline(MAX_DOCUMENT_BYTES + 1)):
                return
            here = f"{where}: line {number}"
            check_size(line, here)
            text = decode(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, here).strip()
            if text:
                yield Document(here, parse_json_line(text, column, here))


def parse_json_line(line: str, column: str, where: str) -> bytes:
    with explain(f"{where} is not JSON", "give one object per line", ValueError, RecursionError):
        row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a JSON {type(row).__name__}; give one object per line")
    require(column in row, "data.column", column, f"{where} has only {format_names(row)}; choose one with text")
    value = row[column]
    is_text = value is None or isinstance(value, str)
    require(is_text, "data.column", column, f"{where} has {json.dumps(value)[:40]} there; choose a column with text")
    with explain(f"{where} is not valid Unicode", "correct it", UnicodeEncodeError):
        return (value or "").encode()


def read_parquet(path: Path, column: str, where: str) -> Iterator[Any]:
    """Arrow batches of up to ROWS_AT_ONCE rows, with the column alone if the file has it."""
    import pyarrow  # late: half a second
    from pyarrow import parquet

    try:
        with ExitStack() as stack:
            file = stack.enter_context(open_stream(path))
            if not file.seekable():  # parquet is read from its end
                packed, file = file, stack.enter_context(TemporaryFile())
                shutil.copyfileobj(packed, file)
            table = parquet.ParquetFile(file)
            columns = [column] if column in table.schema_arrow.names else None
            yield from table.iter_batches(ROWS_AT_ONCE, columns=columns)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{where}: is incomplete or damaged parquet ({one_line(error)}); replace the file") from None


def check_size(text: bytes, where: str) -> None:
    if len(text) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"{where} is longer than {MAX_DOCUMENT_BYTES >> 20} MiB; split that document")


def decode(raw: bytes, where: str, offset: int = 0) -> str:
    """Text of `raw`, which starts at byte `offset` of `where`. Raises ValueError if it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 at byte {offset + error.start}; convert it to UTF-8") from None


def extract_documents(tables: Iterator[Any], column: str, where: str) -> Iterator[Document]:
    """Texts in one column of Arrow tables or batches."""
    import pyarrow

    rows = itertools.count(1)
    for table in tables:
        names = table.schema.names
        fix = f"{where} has only {format_names(names)}; choose one with text, whose name is there once"
        require(names.count(column) == 1, "data.column", column, fix)
        kind = str(table.schema.field(column).type)
        is_text = "string" in kind and "<" not in kind
        require(is_text, "data.column", column, f"has type {kind} in {where}; choose a column with text")
        # As bytes, because Arrow does not check that a string is UTF-8.
        for row, value in zip(rows, table.column(column).cast(pyarrow.large_binary()).to_pylist(), strict=False):
            text, here = value or b"", f"{where}: row {row}"
            check_size(text, here)
            decode(text, here)
            if text:
                yield Document(here, text)


def format_names(names: Collection[str]) -> str:
    return ", ".join([*itertools.islice(names, MAX_NAMES), *["..."][: len(names) - MAX_NAMES]]) or "no columns"


def find_cut(text: bytes, share: float) -> int:
    """Offset at or before a share of a text's bytes where a line, else a word, else a character begins.

    A line or word that begins in the first half before it is too far away to count.
    """
    start = int(share * len(text))
    if not 0 < start < len(text):
        return start
    for mark in (b"\n", b" "):
        if (end := text.rfind(mark, 0, start) + 1) > start // 2:
            return end
    return next(end for end in range(start, -1, -1) if text[end] & 0xC0 != 0x80)


def find_piece_end(buffer: bytes) -> int:
    """Offset at which the document at the start of `buffer` ends."""
    if len(buffer) <= MIN_PIECE:
        return len(buffer)
    if blank := BLANK_LINE.search(buffer, MIN_PIECE):
        return blank.end()
    for mark in (b"\n", b" "):
        if (found := buffer.find(mark, MIN_PIECE)) >= 0:
            return found + len(mark)
    if len(buffer) <= MAX_UNSPLIT:
        return len(buffer)
    # Not inside a character: all its bytes but the first begin with the bits 10.
    last = len(buffer) - 1
    return next((end for end in range(last, last - 4, -1) if buffer[end] & 0xC0 != 0x80), last)
