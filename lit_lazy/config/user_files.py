"""Imports users' Python files: experiments (`config()`) and ablations (`ablation`)."""

import ast
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_lazy.config.schema import RunConfig
from lit_lazy.support.errors import describe_exception, one_line, short_repr
from lit_lazy.support.named_files import find
from lit_lazy.support.provenance import find_last_commit

SETTINGS = ("config", "ablation", "search", "question")
"""Names that a file exports. A cell's key includes their values, so it omits their source."""
OWN = ("lit_lazy", "flash_lazy")
"""This project's packages, which may be next to a user's file without being part of it."""
USER = "lit_lazy_user_"
"""Prefix of the module names of users' files."""


def load_module(path: Path) -> ModuleType:
    """Import a file by its path, once per process. It and the files next to it may import each other.

    Raises a one-line ValueError if that fails or if an imported file next to it is shadowed by another module.
    """
    name = f"{USER}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    for known in (sys.modules.get(name), sys.modules.get(path.stem)):
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    # At the end: a file called queue.py must not shadow the standard library's.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Registered before it runs, because dataclasses look up their module; also under its plain name if that resolves to
    # this file, so that importing it does not define its classes again.
    names = [name, path.stem] if _resolves_to(path.stem, path) else [name]
    sys.modules.update(dict.fromkeys(names, module))
    try:
        with _disable_bytecode(), locate_errors(path):
            spec.loader.exec_module(module)
            for imported, file in _iter_imports(collect_local_files(path, path.parent), path.parent):
                _check_neighbour(imported, file)
    except BaseException:
        for registered in names:
            sys.modules.pop(registered, None)
        raise
    return module


@contextmanager
def _disable_bytecode() -> Iterator[None]:
    """Write no bytecode of a user's file: it would be used for an edited file of the same size and time."""
    former, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = former


def list_imported_files() -> list[Path]:
    """Users' files that this process has imported."""
    return [Path(str(module.__file__)) for name, module in sys.modules.items() if name.startswith(USER)]


def _resolves_to(name: str, path: Path) -> bool:
    """Whether `import name` would find this file."""
    if name in sys.modules or not name.isidentifier():
        return False
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin == str(path)


def _check_neighbour(name: str, file: Path) -> None:
    """Raise ValueError if the imported module `name` is not the file of that name next to the importing file."""
    found = getattr(sys.modules.get(name), "__file__", None)
    if found is not None and Path(found).resolve() != file:
        raise ValueError(f"imports {name!r}, which is {found} and not {file.name} next to it; rename {file.name}")


def read_source(cls: type) -> str:
    """The source of a user's class: its file and all local files that this imports, directly or indirectly.

    Omits the definitions of exported settings. Raises ValueError if a file cannot be read, or if a method uses a
    variable of the function around the class, whose value no source tells.
    """
    try:
        path = Path(inspect.getfile(cls)).resolve()
    except (TypeError, OSError):
        raise ValueError(
            f"{cls.__name__}: its source cannot be read, but is part of the key; define it in a .py file"
        ) from None
    for function in filter(inspect.isfunction, vars(cls).values()):
        outer = sorted({*function.__code__.co_freevars} - {"__class__"})
        # What a dataclass adds comes from no file, or from the standard library.
        if outer and Path(function.__code__.co_filename).resolve() == path:
            raise ValueError(
                f"{cls.__name__}.{function.__name__}: uses {outer[0]!r} of the function around the class, which is no "
                "part of the key; make it a field, or define it at the top of the file"
            )
    # The folder from which its module is imported.
    root = path.parents[cls.__module__.count(".") + (path.name == "__init__.py")]
    left_out = SETTINGS if cls.__module__.startswith(USER) else ()
    files = sorted(collect_local_files(path, root))
    return "\n\n".join(_read_statements(file, left_out if file == path else ()) for file in files)


def hash_uncommitted(files: Iterable[Path]) -> dict[str, str]:
    """The first 12 hex digits of the SHA-256 of user files, and of those next to them that they import, by name.

    Without the files that a checkout holds unchanged: its commit tells what they are.
    """
    every = {local for file in files for local in collect_local_files(file.resolve(), file.resolve().parent)}
    uncommitted = sorted(file for file in every if not find_last_commit(file))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in uncommitted}


def collect_local_files(path: Path, root: Path) -> set[Path]:
    """A file and the files below `root` that it imports, directly or indirectly."""
    found, ahead = {path}, [path]
    while ahead:
        new = {file for _, file in _iter_imports({ahead.pop()}, root)} - found
        found |= new
        ahead += new
    return found


def _iter_imports(files: Iterable[Path], root: Path) -> Iterator[tuple[str, Path]]:
    """Name and file of each module below `root` that the files import."""
    for path in files:
        for name in _iter_imported_names(path, root):
            place = root.joinpath(*name.split("."))
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file.is_file() and name.partition(".")[0] not in OWN:
                    yield name, file.resolve()


def _iter_imported_names(path: Path, root: Path) -> Iterator[str]:
    """Dotted names, from `root`, of all modules that a file's import statements may refer to."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = path.parents[node.level - 1].relative_to(root).parts if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            named = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        else:
            continue
        for name in named:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


def _read_statements(path: Path, left_out: Sequence[str]) -> str:
    """The top-level statements of a file without the definitions of some names: editing a row changes no class."""
    text = path.read_text()
    lines, kept = text.splitlines(), []
    for node in ast.parse(text, str(path)).body:
        if _get_defined_name(node) not in left_out:
            first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
            kept += lines[first - 1 : node.end_lineno]
    return "\n".join(kept)


def _get_defined_name(node: ast.stmt) -> str | None:
    """The name that a statement defines, if it is a function or an assignment of one name."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else None


@contextmanager
def locate_errors(path: Path) -> Iterator[None]:
    """Turn every error of a user's file into a one-line ValueError that names the file and its line."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"{path}: {_locate(error, path)}") from error


def _locate(error: BaseException, path: Path) -> str:
    """`line 3: NameError: ...`: the last line of this file that an exception passed through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    # This project's own messages are ValueErrors.
    text = one_line(error) if type(error) is ValueError else describe_exception(error)
    return f"line {line}: {text}" if line else text


def experiment(name: str) -> RunConfig:
    """The config of an experiment, by name or by the path of its file. Raises ValueError if it does not exist."""
    return load_experiment(find("experiments", name))


def load_attribute(path: Path, name: str) -> Any:
    """The value that a file defines under a name, or None. Raises a one-line ValueError if the file fails."""
    module = load_module(path)
    with locate_errors(path):  # the file may define __getattr__
        return getattr(module, name, None)


def load_experiment(path: Path) -> RunConfig:
    """The config that an experiment file's `config()` returns."""
    config = load_attribute(path, "config")
    if not callable(config) or inspect.iscoroutinefunction(config):
        raise ValueError(f"{path}: defines no function config(); give it one that returns a RunConfig")
    with locate_errors(path):
        made = config()
    if not isinstance(made, RunConfig):
        raise ValueError(f"{path}: config() returned {short_repr(made)}; it must return a RunConfig")
    return made
