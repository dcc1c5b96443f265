"""Finds and imports the user's Python files: experiments (`config()`) and ablations (`ablation`)."""

import ast
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

from lit_lazy.config.schema import RunConfig

PROJECT = Path(__file__).parents[2]
Room = Literal["experiments", "ablations"]
SETTINGS = ("config", "ablation", "search")
"""What a file exports. The values that it makes are in a cell's key, so its source need not be."""


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
    """Import a file by its path, once per process. It may import the files beside it.

    Raises ValueError, in one line, where it fails, and where a file beside it has the name of another module.
    """
    name = f"lit_lazy_user_{path.parent.name}_{path.stem}"
    module = sys.modules.get(name)
    if module is not None and module.__file__ == str(path):
        return module
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    # Behind everything else: a file called queue.py is not to take the place of Python's own.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Registered before it runs, because dataclasses look up their own module.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        for imported, file in local_imports(path).items():
            _check_neighbour(imported, file)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"{path}: {_where(error, path)}") from error
    return module


def _check_neighbour(name: str, file: Path) -> None:
    """Raise ValueError where the module of a name is not the file of that name beside an importing file."""
    found = getattr(sys.modules.get(name), "__file__", None)
    if found is not None and Path(found).resolve() != file:
        raise ValueError(f"imports {name!r}, which is {found} and not {file.name} beside it; rename {file.name}")


def local_imports(path: Path) -> dict[str, Path]:
    """The files below a file's own folder that its import statements name, by module name."""
    found = {}
    for name in _imported(ast.parse(path.read_text(), str(path))):
        place = path.parent.joinpath(*name.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                found[name] = file.resolve()
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names of all modules that may be meant by the import statements of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            named = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in named:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def source_of(path: Path) -> str:
    """The source of a file and of the local files that it imports, without what only makes settings."""
    return "\n\n".join(_statements(file) for file in sorted(_with_local_imports(path.resolve())))


def _with_local_imports(path: Path) -> set[Path]:
    found, ahead = {path}, [path]
    while ahead:
        new = set(local_imports(ahead.pop()).values()) - found
        found |= new
        ahead += new
    return found


def _statements(path: Path) -> str:
    """The top-level statements of a file, but for the definitions of `SETTINGS`: editing a row changes no class."""
    text = path.read_text()
    lines, kept = text.splitlines(), []
    for node in ast.parse(text, str(path)).body:
        if _defined(node) not in SETTINGS:
            first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
            kept += lines[first - 1 : node.end_lineno]
    return "\n".join(kept)


def _defined(node: ast.stmt) -> str | None:
    """The name that a statement defines, if it is a function or a plain assignment of one name."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


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
