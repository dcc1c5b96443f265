"""Finds and imports the user's Python files: experiments (`config()`) and ablations (`ablation`)."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Literal

from lit_lazy.config.schema import RunConfig

PROJECT = Path(__file__).parents[2]
Room = Literal["experiments", "ablations"]


def find(room: Room, name: str) -> Path:
    """The file that `name` means: a path to a .py file, or the name of one in `room` here or in the project.

    Raises ValueError that names what was looked for and what there is.
    """
    if name.endswith(".py"):
        return python_file(room[:-1], name)
    for root in (Path.cwd(), PROJECT):
        path = root / room / f"{name}.py"
        if path.is_file():
            return path.resolve()
    raise ValueError(
        f"{room[:-1]} {name!r}: unknown; there are {', '.join(available(room))}, or give a path to a .py file"
    )


def python_file(what: str, name: str) -> Path:
    """The file of this name. Raises ValueError that names what it is for."""
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"{what} {name!r}: no such file; give the path of a .py file that is there")
    return path.resolve()


def available(room: Room) -> list[str]:
    """Names of the files in `room`, here and in the project."""
    return sorted({path.stem for root in (Path.cwd(), PROJECT) for path in (root / room).glob("*.py")})


def load_module(path: Path) -> ModuleType:
    """Import a file by its path, once per process."""
    name = f"lit_lazy_user_{path.parent.name}_{path.stem}"
    module = sys.modules.get(name)
    if module is not None and module.__file__ == str(path):
        return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, because dataclasses look up their own module.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"{path}: {_where(error, path)}") from error
    return module


def _where(error: BaseException, path: Path) -> str:
    """`line 3: NameError: ...`: the last line of this file that an exception went through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    text = " ".join(str(error).split())
    # This project's own messages are ValueErrors.
    told = text if type(error) is ValueError else f"{type(error).__name__}: {text}"
    return f"line {line}: {told}" if line else told


def load_experiment(path: Path) -> RunConfig:
    """The config that an experiment file's `config()` returns."""
    config = getattr(load_module(path), "config", None)
    if not callable(config):
        raise ValueError(f"{path}: defines no function config(); give it one that returns a RunConfig")
    try:
        made = config()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: {_where(error, path)}") from error
    if not isinstance(made, RunConfig):
        raise ValueError(f"{path}: config() returned {made!r}; let it return a RunConfig")
    return made
