"""Text files that a path, a folder or a glob selects, and their content, decompressed as it is read."""

import codecs
import glob
import io
import os
import re
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePath
from typing import BinaryIO

from lit_lazy.support.checked_fields import require
from lit_lazy.support.error_messages import one_line

FORMATS = (".txt", ".md", ".jsonl", ".json", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
SNIFFED = 2**13
KNOWN = f"text in UTF-8, .jsonl, .json or .parquet, each also with {' or '.join(COMPRESSIONS)}"


def split_suffixes(path: str | Path) -> tuple[str, str]:
    """Suffixes of a file's format and of its compression in lower case, each "" if there is none."""
    name = PurePath(path).name.lower()
    packed = PurePath(name).suffix if PurePath(name).suffix in COMPRESSIONS else ""
    return PurePath(name.removesuffix(packed)).suffix, packed


def open_stream(path: Path) -> BinaryIO:
    """Open a file's content, which is decompressed as it is read. Damaged content raises OSError."""
    _, packed = split_suffixes(path)
    if not packed:
        return path.open("rb")
    import pyarrow  # late: half a second

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=COMPRESSIONS[packed]))  # type: ignore


def find_files(field: str, given: str) -> tuple[tuple[Path, ...], str]:
    """Files that a path, a folder (all in it) or a glob selects, sorted by path, and what was left out, in words.

    Links are followed, and each file is taken once. Left out are hidden files, empty ones, and those that are in no
    format of FORMATS and do not begin with text. Raises a one-line ValueError if nothing is left.
    """
    left_out: Counter[str] = Counter()
    found: dict[tuple[int, int], Path] = {}
    try:
        root = Path(given).expanduser()
        with suppress(FileNotFoundError):  # a glob is no file
            root.stat()  # names a loop of links, which a glob would only not match
        pattern = os.path.join(glob.escape(str(root)), "**/*") if root.is_dir() else str(root)
        matches = [str(root)] if root.is_file() else list(_match_files(pattern, left_out))
        for path in sorted(matches, key=os.path.islink):  # a link gives way to the file itself
            state = os.stat(path) if os.path.isfile(path) else None
            suffix, _ = split_suffixes(path)
            if state is None:
                left_out["unreadable"] += 1
            elif not state.st_size:
                left_out["empty"] += 1
            elif suffix not in FORMATS and not _is_text(Path(path)):
                left_out[suffix or "without suffix"] += 1
            elif (state.st_dev, state.st_ino) in found:
                left_out["linked again"] += 1
            else:  # not resolved: what links of the Hub's cache lead to has no suffix
                found[state.st_dev, state.st_ino] = Path(os.path.abspath(path))
    except (OSError, RuntimeError, ValueError) as error:  # name too long, unknown user, unreadable folder
        name = getattr(error, "filename", None) or given
        why = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"{field}={str(name)!r}: {why}; choose another path") from None
    fix = "is no file or folder, and as a glob it matches no file; give text that exists"
    require(bool(root.is_dir() or matches or left_out), field, given, fix)
    omitted = ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items()))
    require(bool(found), field, given, f"has no file with text ({omitted or 'it is empty'}); give {KNOWN}")
    return tuple(sorted(found.values())), omitted


def _is_text(path: Path) -> bool:
    """Whether the first SNIFFED bytes of a file are UTF-8 without a NUL."""
    try:
        with open_stream(path) as file:
            start = file.read(SNIFFED)
        codecs.getincrementaldecoder("utf-8")().decode(start)  # its last character may be cut
    except (OSError, UnicodeDecodeError):
        return False
    return b"\0" not in start


def _match_files(pattern: str, left_out: Counter[str]) -> Iterator[str]:
    """Paths that a glob matches; below `**` no hidden ones. Links to folders are followed, each folder once."""
    pattern = re.sub(r"(^|/)\*\*$", r"\1**/*", pattern)
    if (mark := re.search(r"(?:^|(?<=/))\*\*/", pattern)) is None:
        yield from (path for path in sorted(glob.glob(pattern)) if not os.path.isdir(path))
        return
    from fsspec.utils import glob_translate  # late: a quarter of a second

    wanted = re.compile(glob_translate(pattern[mark.start() :]))
    for folder in sorted(glob.glob(pattern[: mark.start()] or ".")):
        # Not by glob itself, which takes exponential time where links make loops.
        yield from (path for path in _walk(folder, left_out) if wanted.match(os.path.relpath(path, folder)))


def _walk(root: str, left_out: Counter[str]) -> Iterator[str]:
    """Files below a folder, but no hidden ones; linked folders come last, because they may be linked again."""
    folders, seen = deque([root]), set()
    while folders:
        folder = folders.popleft()
        if (real := os.path.realpath(folder)) in seen:
            left_out["linked again"] += 1
            continue
        seen.add(real)
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    left_out["hidden"] += 1
                elif not os.path.isdir(entry.path):
                    yield entry.path
                elif entry.is_symlink():
                    folders.append(entry.path)
                else:
                    folders.appendleft(entry.path)


def read_file_states(paths: tuple[Path, ...]) -> list[tuple[str, int, int]]:
    """Path, size in bytes and modification time in ns of each file."""
    return [(str(path), (stat := path.stat()).st_size, stat.st_mtime_ns) for path in paths]
