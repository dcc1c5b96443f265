"""Databases in folders that this process cannot write, such as another user's or a CD's."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from lit_lazy.support.disk import is_read_only
from lit_lazy.tracking.databases import StorageError, has_content, sqlite_file, sqlite_url


@contextmanager
def open_readable(url: str) -> Iterator[str]:
    """The URL of a database, or of a temporary copy of an sqlite file that this process cannot write.

    MLflow and Optuna write to a database when they open it, and both need locks. Folders beside the file, as MLflow's
    artifacts, are linked beside the copy. Raises StorageError if the file cannot be read.
    """
    file = sqlite_file(url)
    if file is None or not has_content(file) or not (is_read_only(file) or is_read_only(file.parent)):
        yield url
        return
    with TemporaryDirectory(prefix="lit-lazy-") as scratch:
        copy = Path(scratch, file.name)
        _copy_database(file, copy)
        for folder in (entry for entry in file.parent.iterdir() if entry.is_dir()):
            copy.with_name(folder.name).symlink_to(folder.resolve())
        yield sqlite_url(copy)


def _copy_database(file: Path, copy: Path) -> None:
    """Copy an sqlite file in a consistent state, although its owner may write meanwhile."""
    try:
        source = sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)
        with closing(source), closing(sqlite3.connect(copy)) as target:
            source.backup(target)
    except sqlite3.Error as error:
        raise StorageError(
            f"{str(file)!r}: cannot be read in a read-only folder ({error}); copy the folder to a disk that can be "
            "written, and name the copy"
        ) from None
