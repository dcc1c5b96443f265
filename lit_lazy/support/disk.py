"""Atomic writes, quarantined files and full disks."""

import errno
import fcntl
import logging
import os
import re
import resource
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from io import BufferedReader
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from lit_lazy.support.error_messages import BusyError, explain, iter_causes
from lit_lazy.support.names_to_paths import delete

PATHS_BELOW = 600
"""Upper bound on the length of paths below a folder of results, in bytes."""
log = logging.getLogger("lit_lazy.support.disk")
FEW_FILES = 32
"""Upper bound on the files of a cell, including MLflow's."""
PROBE_BYTES = 2**20
WRITE_REFUSED = "a write met the limit on the size of files; raise it, `ulimit -f`"
SQLITE_FAILED = ("disk I/O error",)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of file systems that lock no files, such as NFS without its lock service."""
PRIVATE = 0o600
"""Mode of logs: they contain messages of libraries, which may show an address with its password."""


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file completely or leave it unchanged, also after a kill, a power cut or on a full disk.

    Raises BusyError as `require_held` does.
    """
    with _hold_scratch(path) as (scratch, held):
        with os.fdopen(held, "wb", closefd=False) as file:
            write(file)
            file.flush()
            os.fsync(held)
        require_held(path)
        scratch.replace(path)
    _sync_folder(path.parent)


guards: dict[Path, Callable[[], bool]] = {}
"""By resolved folder, whether this process, which took it by a lease, has it still: a lease may be lost."""


def require_held(path: Path) -> None:
    """Raise BusyError if a file is in a folder that another process has taken over since this one took it."""
    for folder in (path.parent / "_").resolve().parents if guards else ():
        if folder in guards and not guards[folder]():
            raise BusyError(f"another process has taken over {folder}, as this one was stopped for long")


@contextmanager
def _hold_scratch(path: Path, is_folder: bool = False) -> Iterator[tuple[Path, int]]:
    """A temporary file or folder for a path, removed at the end, and its descriptor, which locks it while it is in use.

    Removes those that dead processes of this machine left. Locks tell them, and not process ids, which are used again
    and which each container counts for itself.
    """
    mark = f".{path.name}.{socket.gethostname()}."
    for left in path.parent.glob(f"{escape(mark)}*"):
        with suppress(OSError):  # it has been renamed or removed, or nothing can be locked there
            remove_unused(left)
    while True:
        scratch = path.with_name(f"{mark}{secrets.token_hex(4)}")
        if is_folder:
            scratch.mkdir()
        held = os.open(scratch, os.O_RDONLY if is_folder else os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if _try_lock(held, scratch):
                break
        except OSError:  # nothing can be locked there, so nobody takes it for a leftover
            break
        os.close(held)  # another process took it for a leftover before it was locked
    try:
        yield scratch, held
    finally:
        delete(scratch)
        os.close(held)


@contextmanager
def _try_hold(path: Path) -> Iterator[bool]:
    """Whether no process uses a temporary file or folder, which is locked in the block if so. Raises OSError."""
    held = os.open(path, os.O_RDONLY if path.is_dir() else os.O_WRONLY)  # NFS locks no file that was opened to read
    try:
        yield _try_lock(held, path)
    finally:
        os.close(held)


def remove_unused(path: Path) -> None:
    """Remove a temporary file or folder unless a process uses it."""
    with _try_hold(path) as unused:
        if unused:
            delete(path)


def find_leftovers(folder: Path) -> list[Path]:
    """Temporary files and folders anywhere in a folder that dead processes of this machine left."""
    of_host = re.compile(rf"\..+\.{re.escape(socket.gethostname())}\.[0-9a-f]{{8}}")
    found = []
    for path in filter(lambda path: of_host.fullmatch(path.name), sorted(folder.rglob(".*"))):
        with suppress(OSError), _try_hold(path) as unused:  # where nothing can be locked, nobody can tell
            found += [path] if unused else []
    return found


def measure_bytes(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 if there is none. Links are not followed."""
    if not os.path.lexists(path):
        return 0
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in files if file.is_symlink() or not file.is_dir())


def _try_lock(held: int, path: Path) -> bool:
    """Lock an open file or folder; False if another process holds or has removed it.

    Raises OSError if nothing can be locked there.
    """
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return path.exists()


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def create_folder_atomically(path: Path) -> Iterator[Path]:
    """A temporary folder to fill; on success it is renamed to `path`, which may be an empty folder.

    Raises OSError if `path` is anything else by then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _hold_scratch(path, is_folder=True) as (scratch, _):
        yield scratch
        for file in scratch.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        scratch.replace(path)
    _sync_folder(path.parent)


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError for a pipe or a device, which may block or never end."""
    if stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode):
        return path.open("rb")
    raise OSError(errno.EINVAL, "It is a pipe or a device, and no file", str(path))


def write_text(path: Path, text: str) -> None:
    """Write a text atomically."""
    write_atomically(path, lambda file: file.write(text.encode()))


def open_private(path: str, flags: int) -> int:
    """Opener for `open` whose new files only this user may read."""
    return os.open(path, flags, PRIVATE)


def quarantine(path: Path, why: str) -> None:
    """Rename a damaged file or folder and log a warning; whoever reads it starts again without it."""
    aside = path.with_name(f"{path.name}.damaged")
    if aside.is_dir():  # a folder, unlike a file, replaces only an empty one
        delete(aside)
    path.replace(aside)
    log.warning("%s: %s; quarantined as %s, started again without it", path, why, aside.name)


def _find_cause(error: BaseException, numbers: Collection[int], texts: Collection[str]) -> BaseException | None:
    """An exception, or the first of its causes, that has one of these numbers or texts."""
    causes = iter_causes(error)
    return next((x for x in causes if getattr(x, "errno", None) in numbers or any(t in str(x) for t in texts)), None)


def is_disk_full(error: BaseException) -> bool:
    """Whether an exception or one of its causes reports that no space is left."""
    full = "disk is full", "No space left on device"  # of sqlite, PostgreSQL, torch
    return _find_cause(error, (errno.ENOSPC, errno.EDQUOT), full) is not None


def describe_failed_write(error: BaseException) -> str:
    """Cause and fix of a write that failed for lack of space, or although there is space; "" for other exceptions.

    Also of a disk that fails to read or to write, which errors do not tell apart.
    """
    if is_disk_full(error):
        return "no space left; free some"
    limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY  # writes fail until it is raised
    if _find_cause(error, (errno.EFBIG,), SQLITE_FAILED if limited else ()) is not None:
        return WRITE_REFUSED
    if (failed := _find_cause(error, (errno.EIO,), SQLITE_FAILED)) is not None:
        file = getattr(failed, "filename", None)
        return f"the disk fails{f' at {file!r}' if file else ''} ({os.strerror(errno.EIO)}); check it"
    return ""


def describe_shortage(folder: Path, size: int) -> str:
    """What the disk lacks for a few files of `size` bytes in a folder; "" if nothing.

    Writes some bytes as a test, because disk statistics do not include quotas.
    """
    if shutil.disk_usage(folder).free < size:
        return f"{size / 1e6:.0f} MB"
    disk = os.statvfs(folder)
    if disk.f_files and disk.f_favail < FEW_FILES:  # some file systems do not report inodes
        return f"inodes for {FEW_FILES} files"
    try:
        with TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
    except OSError as error:
        if not is_disk_full(error):
            raise
        return f"{PROBE_BYTES / 1e6:.0f} MB ({error.strerror})"
    return ""


def is_read_only(path: Path) -> bool:
    """Whether a file or folder exists but cannot be written, by its mode or because the file system is read-only."""
    return path.exists() and not os.access(path, os.W_OK)


def check_writable_file(option: str, file: Path) -> None:
    """Raise a one-line ValueError unless a file can be created or replaced; its folder may not exist yet."""
    if file.exists() and not file.is_file():
        fix = "a folder; name a file in it" if file.is_dir() else "no file; name another"
        raise ValueError(f"{option} {str(file)!r}: is {fix}")
    check_writable_folder(option, file.parent)


def check_writable_folder(option: str, folder: Path) -> None:
    """Raise a one-line ValueError unless files can be created in a folder or, if it does not exist, in its parent."""
    whole = folder.resolve()
    there = next(parent for parent in (whole, *whole.parents) if os.path.exists(parent))
    with explain(f"{option} {str(folder)!r}: nothing can be written there", "name another folder", OSError):
        if len(os.fsencode(whole)) + PATHS_BELOW > os.pathconf(there, "PC_PATH_MAX"):
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        with suppress(FileNotFoundError):
            whole.stat()
        with TemporaryFile(dir=there):  # it has no name, so nothing is left behind
            pass
