"""Lock files, where files can be locked."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import filelock

from lit_lazy.support.disk import NO_LOCKS, describe_missing_locks


class FileLock(filelock.FileLock):
    """A lock file, freed when its process ends. Raises a one-line ValueError where no file can be locked."""

    def acquire(self, *args: Any, **kwargs: Any) -> filelock.AcquireReturnProxy:
        try:
            return super().acquire(*args, **kwargs)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            folder = os.path.dirname(self.lock_file) or "."
            raise ValueError(describe_missing_locks(folder, error)) from None


@contextmanager
def hold_shared(path: Path) -> Iterator[None]:
    """Hold a lock file that others may hold too."""
    with path.open("ab") as file:
        with suppress(OSError):  # where no file can be locked, nobody sees that it is held
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def is_shared(path: Path) -> bool:
    """Whether a process holds a lock file by `hold_shared`."""
    if not os.access(path, os.W_OK):
        return False
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
