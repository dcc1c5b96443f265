"""Optuna drives: a grid is a study, and each attempt at a cell a trial, which names the cell.

Cells' folders decide what is left to do. A study that is lost, damaged or older therefore loses nothing, and a storage
that does not answer stops nothing.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from lit_lazy.support.disk import check_writable_folder, is_disk_full, quarantine
from lit_lazy.support.error_messages import describe_exception
from lit_lazy.support.locks import make_file_lock
from lit_lazy.support.secrets import redact_url
from lit_lazy.tracking.check_databases import check_database, make_engine_options
from lit_lazy.tracking.store_address import sqlite_file
from lit_lazy.training.run_folder import read_grid_id

optuna.logging.set_verbosity(optuna.logging.WARNING)

JOURNAL = "optuna.journal"
"""Default storage, in a grid's folder."""
MOST_TRIES, AGAIN_SECONDS = 3, 1.0
"""Attempts at opening a database, and the pause between two."""
KEY, VARIANT, SEED = "key", "variant", "seed"
"""Attributes of a trial."""

log = logging.getLogger("lit_lazy.grid.study")
T = TypeVar("T")


class _JournalLock:
    """Lock of a journal for a write. Optuna's own locks outlive a process that is killed; this one does not."""

    def __init__(self, journal: Path) -> None:
        self._journal, self._lock = journal, make_file_lock(journal.with_name(f"{journal.name}.lock"))

    def acquire(self) -> bool:
        self._lock.acquire()
        if self._journal.exists():
            # A full disk, a power cut or a copy may have torn the last line: another one after it would damage both.
            with self._journal.open("r+b") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
                if file.read() not in (b"", b"\n"):
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        self._lock.release()


def normalise_url(storage: str) -> str:
    """A storage URL with the driver that this project installs.

    Raises a one-line ValueError unless it is a PostgreSQL URL or names an sqlite file.
    """
    scheme, _, rest = storage.partition("://")
    known = scheme in ("sqlite", "postgresql", "postgresql+psycopg")
    wrong = rest in ("", "/", "/:memory:") or (scheme == "sqlite" and not rest.startswith("/")) or rest.count("@") > 1
    if wrong or not known:
        raise ValueError(
            f"--storage {redact_url(storage)!r}: must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE, "
            "with %40 for an @ in the password"
        )
    return storage.replace("postgresql://", "postgresql+psycopg://", 1)


def check_storage(storage: str) -> None:
    """Raise a one-line ValueError if a storage cannot be used; creates nothing."""
    url = normalise_url(storage)
    if (file := sqlite_file(url)) is not None:
        if not file.parent.is_dir():
            raise ValueError(
                f"--storage {storage!r}: folder {str(file.parent)!r} does not exist; create it, or name another file"
            )
        check_writable_folder("--storage", file.parent)
    check_database("--storage", url, "studies")


def open_study(storage: str | None, folder: Path) -> optuna.Study:
    """The study of a grid's folder, which is made if it is missing. storage: its URL; None for a file in the folder.

    Its name tells the folder from others of its name, which `--fresh` moves aside or another user has.
    """
    name = f"{folder.name} {read_grid_id(folder)[:8]}"
    if storage is not None:
        url = normalise_url(storage).replace("{", "{{").replace("}", "}}")  # Optuna uses it as a format string
        return _load(_open_database(url), name)
    file = folder / JOURNAL

    def load() -> optuna.Study:
        return _load(JournalStorage(JournalFileBackend(str(file), _JournalLock(file))), name)  # type: ignore[arg-type]

    try:
        return load()
    except (ValueError, LookupError, TypeError) as error:
        quarantine(file, describe_exception(error))
        return load()


def _open_database(url: str) -> RDBStorage:
    """Open a database with Optuna's tables, which it fails to create while another process creates them."""
    for _ in range(MOST_TRIES - 1):
        with suppress(SQLAlchemyError):
            return RDBStorage(url, engine_kwargs=make_engine_options(url))
        time.sleep(AGAIN_SECONDS)
    return RDBStorage(url, engine_kwargs=make_engine_options(url))


def _load(storage: BaseStorage, name: str) -> optuna.Study:
    return optuna.create_study(storage=storage, study_name=name, load_if_exists=True)


class GridStudy:
    """The study of a grid, as long as its storage answers."""

    def __init__(self, storage: str | None, folder: Path) -> None:
        self._study = self._try(lambda: open_study(storage, folder))
        self._trials: dict[str, Trial] = {}

    def begin(self, key: str, variant: str, seed: int) -> str:
        """Enqueue a cell and ask for one; returns the key of the cell that Optuna gives, perhaps another command's."""

        def ask() -> Trial:
            assert self._study is not None
            self._study.enqueue_trial({}, user_attrs={KEY: key, VARIANT: variant, SEED: seed})
            return self._study.ask()

        trial = self._try(ask) if self._study is not None else None
        if trial is None:
            return key
        given = str(trial.user_attrs.get(KEY, key))
        self._trials[given] = trial
        return given

    def end(self, key: str, value: float | None) -> None:
        """Tell how an attempt at a cell ended: with its loss, or without a result."""
        trial = self._trials.pop(key, None)
        if trial is None or self._study is None:
            return
        study, state = self._study, TrialState.FAIL if value is None else TrialState.COMPLETE
        self._try(lambda: study.tell(trial, value, state=state))

    def _try(self, work: Callable[[], T]) -> T | None:
        """The result of an access to the storage; None, and no further access, if it fails."""
        try:
            return work()
        except Exception as error:  # each storage has its own
            if is_disk_full(error):
                raise
            log.warning("Optuna's storage fails (%s); the grid goes on without it", describe_exception(error))
            self._study = None
            return None
