"""Finds users' Python files, experiments, ablations and grids by name or path, without importing anything heavy."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from lit_lazy.support.errors import did_you_mean

PROJECT = Path(__file__).parents[2]
Room = Literal["experiments", "ablations"]
OTHER: dict[Room, Room] = {"experiments": "ablations", "ablations": "experiments"}
RUN: dict[Room, str] = {"experiments": "train", "ablations": "ablate run"}
MADE = {"models/smollm2.ckpt": "make smollm2", "models/tokenizer.json": "make smollm2"}
"""Files of shipped experiments that are no part of a clone -> the command that makes them."""
LONGEST_NAME = 100
"""Bytes of a name that becomes part of a folder's name; file systems allow 255."""


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


def find_grids(name: str, known: Iterable[str]) -> list[str]:
    """The known grids that `name` denotes: the one of this id, or else those of an ablation of this name."""
    return [grid for grid in known if grid == name] or [grid for grid in known if grid.startswith(f"{name}-")]


def list_available(room: Room) -> list[str]:
    """Names of the files in `room`, here and in the project."""
    return sorted({path.stem for root in (Path.cwd(), PROJECT) for path in (root / room).glob("*.py")})
