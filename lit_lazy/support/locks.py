"""Lock files, where files can be locked."""

import os
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
