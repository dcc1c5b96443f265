"""Names that become paths inside a folder, and deletion that stays inside it."""

import os
import shutil
import stat
from pathlib import Path

from lit_lazy.support.errors import short_repr

LONGEST_ENTRY = 255
"""Bytes of a name that file systems allow."""


def is_entry_name(name: object) -> bool:
    """Whether a folder can have an entry of this name, which leads nowhere else."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= LONGEST_ENTRY
    except UnicodeEncodeError:
        return False


def join_name(folder: Path, name: object) -> Path:
    """The path of a folder's entry whose name a database, a file or a user gave: the only way from a name to a path.

    Raises a one-line ValueError unless it is a name alone, and no path.
    """
    if not is_entry_name(name):
        raise ValueError(f"{short_repr(name)}: is no name of an entry of {str(folder)!r}; rename it where it is stored")
    return folder / str(name)


def find_obstacle(path: Path, root: Path) -> str:
    """Why a file or folder in the folder `root` cannot be deleted, with the fix; "" if it can.

    A link on the way to it, or a file system mounted there, leads out of `root`; a link at its end is itself deleted.
    """
    import psutil  # takes time that most commands can save

    inside = path.relative_to(root)
    if ".." in inside.parts:
        return f"it is not in {str(root)!r}"
    for above in inside.parents[:-1]:
        if (root / above).is_symlink():
            return f"{str(root / above)!r} is a link; remove what it leads to yourself"
    real_root = root.resolve()
    real = real_root / inside
    for mount in (Path(one.mountpoint) for one in psutil.disk_partitions(all=True)):
        if real_root in mount.parents and (mount.is_relative_to(real) or real.is_relative_to(mount)):
            return f"a file system is mounted at {str(mount)!r}; unmount it first"
    below = [] if path.is_symlink() else [Path(folder) for folder, _, _ in os.walk(path)]
    for folder in (path.parent, *below):
        if folder.exists() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return f"you may not write in {str(folder)!r}; ask its owner to remove it"
    return ""


def require_deletable(path: Path, root: Path) -> None:
    """Raise a one-line ValueError if a file or folder in the folder `root` cannot be deleted."""
    if obstacle := find_obstacle(path, root):
        raise ValueError(f"{str(path)!r}: cannot be removed: {obstacle}")


def delete(path: Path, root: Path | None = None) -> None:
    """Delete a file, a link, or a folder with everything in it, if it is there.

    root: the folder that it must not leave; the folder around it by default. Raises a one-line ValueError, and deletes
    nothing, if there is a `find_obstacle`; OSError for what else cannot be deleted.
    """
    root = path.parent if root is None else root
    if not os.path.lexists(path):
        return
    require_deletable(path, root)
    *above, name = path.relative_to(root).parts
    held = os.open(root, os.O_DIRECTORY)
    try:
        for part in above:  # the kernel refuses what has become a link meanwhile
            held, former = os.open(part, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=held), held
            os.close(former)
        if stat.S_ISDIR(os.stat(name, dir_fd=held, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=held)
        else:
            os.unlink(name, dir_fd=held)
    except FileNotFoundError:  # another process may remove it too
        pass
    finally:
        os.close(held)
