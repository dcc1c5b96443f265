"""From names to paths: users' Python files, grids, models, entries of folders; deletion that stays in a folder."""

import glob
import os
import posixpath
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from lit_lazy.support.error_messages import did_you_mean, short_repr

PROJECT = Path(__file__).parents[2]
Room = Literal["experiments", "ablations"]
OTHER: dict[Room, Room] = {"experiments": "ablations", "ablations": "experiments"}
RUN: dict[Room, str] = {"experiments": "train", "ablations": "ablate run"}
MADE = {"models/smollm2.ckpt": "make smollm2", "models/tokenizer.json": "make smollm2"}
"""Files of shipped experiments that are no part of a clone -> the command that makes them."""
MODEL_SOURCES = "a folder with config.json and safetensors, a .gguf file, or a name on the Hub"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
LONGEST_METRIC = 250
"""Characters that MLflow takes in the name of a metric."""
NOT_IN_METRICS = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow does not take there."""
LONGEST_NAME = 100
"""Bytes of a name that becomes part of a folder's name."""
LONGEST_ENTRY = 255
"""Bytes of a name that file systems allow."""


def find(room: Room, name: str) -> Path:
    """The file that `name` denotes: a path to a .py file, or the name of one in `room` here or in the project.

    Raises a ValueError that lists the available names.
    """
    if name.endswith(".py"):
        return find_python_file(room[:-1], name)
    for root in (Path.cwd(), PROJECT):
        path = root / room / f"{name}.py"
        if os.path.isfile(path):  # also False for invalid file names
            return require_usable_name(path.resolve())
    if os.path.isfile(f"{name}.py"):
        raise ValueError(f"{room[:-1]} {name!r}: unknown (did you mean {name}.py?); a path ends in .py")
    if name in list_available(other := OTHER[room]):
        fix = f"it is an {other[:-1]}: `lit-lazy {RUN[other]} {name}` runs it"
        raise ValueError(f"{room[:-1]} {name!r}: unknown; {fix}")
    known = list_available(room)
    there = ", ".join(known) or "none outside the project's clone"
    problem = f"{room[:-1]} {name!r}: unknown{did_you_mean(name, known)}"
    raise ValueError(f"{problem}; there are {there}, or give a path to a .py file")


def get_name(room: Room, path: Path) -> str:
    """What `find` takes for a file: its name if it lies in `room` here or in the project, otherwise its path."""
    rooms = [(root / room).resolve() for root in (Path.cwd(), PROJECT)]
    return path.stem if path.resolve().parent in rooms else str(path)


def find_python_file(what: str, name: str) -> Path:
    """The path of an existing .py file. Raises a ValueError that starts with `what`."""
    if not os.path.isfile(name):
        raise ValueError(f"{what} {name!r}: no such file; give the path of an existing .py file")
    return require_usable_name(Path(name).resolve())


def require_usable_name(path: Path) -> Path:
    """The path, if its name can be part of folder and experiment names. Raises a one-line ValueError otherwise."""
    if not path.stem.isprintable() or len(path.stem.encode()) > LONGEST_NAME:
        fix = f"use at most {LONGEST_NAME} bytes, all printable"
        raise ValueError(f"{str(path)!r}: its name becomes part of folder names; {fix}")
    return path


def suggest_file(path: str, otherwise: str) -> str:
    """What to do about a file that cannot be read: the command that makes it if it is one of `MADE`, or `otherwise`."""
    return f"`{MADE[path]}` makes it" if path in MADE and not os.path.exists(path) else otherwise


def list_files(pattern: str) -> list[Path]:
    """The files that a path or a pattern denotes, and all files in its folders but bytecode."""
    found = [Path(path) for path in glob.glob(pattern, recursive=True)]
    return sorted(
        {
            file
            for path in found
            for file in (path, *path.rglob("*"))
            if file.is_file() and "__pycache__" not in file.parts
        }
    )


def is_hub_name(given: Path) -> bool:
    """Whether a path that does not exist can be a name on the Hub."""
    return HUB_NAME.fullmatch(str(given)) is not None and given.suffix not in (".gguf", *PICKLES)


def find_grids(name: str, known: Iterable[str], get_ablation: Callable[[str], str] | None = None) -> list[str]:
    """The known grids that `name` denotes: the one of this id, or else those of an ablation of this name.

    get_ablation: the ablation of a grid; without it, ablations whose names begin alike count too.
    """
    same = [grid for grid in known if grid == name]
    alike = (grid for grid in known if grid.startswith(f"{name}-"))
    return same or [grid for grid in alike if get_ablation is None or get_ablation(grid) == name]


def list_available(room: Room) -> list[str]:
    """Names of the files in `room`, here and in the project."""
    return sorted({path.stem for root in (Path.cwd(), PROJECT) for path in (root / room).glob("*.py")})


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


def is_metric_name(name: str) -> bool:
    """Whether MLflow, which keeps metrics as files, takes a name: some characters only, no path of another form."""
    inside = posixpath.normpath(name) == name and name != "." and not name.startswith(("..", "/"))
    return inside and len(name) <= LONGEST_METRIC and not NOT_IN_METRICS.search(name)
