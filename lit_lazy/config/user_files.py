"""Imports users' Python files: experiments (`config()`) and ablations (`ablation`)."""

import hashlib
import importlib.abc
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from lit_lazy.config.schema import RunConfig
from lit_lazy.support.class_source import USER, collect_local_files, find_imported_content, iter_imports
from lit_lazy.support.errors import describe_exception, one_line, short_repr
from lit_lazy.support.named_files import find
from lit_lazy.support.provenance import find_last_commit

COMMANDS = {"question": "ablate run", "ablation": "ablate run", "search": "ablate search"}
"""The command for a file that defines no experiment, by the name that it defines."""
_imported: WeakKeyDictionary[ModuleType, tuple[ModuleSpec | None, dict[Path, bytes]]] = WeakKeyDictionary()
"""The import of each user's file, and its content and that of the imported files next to it then."""


class _UserFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of `load_module` again, for `importlib.reload`."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        file = getattr(target, "__file__", None)
        return spec_from_file_location(fullname, file) if fullname.startswith(USER) and file else None


sys.meta_path.append(_UserFinder())


def load_module(path: Path) -> ModuleType:
    """Import a file by its path, once per process, and anew once it, or a file next to it that it imports, was edited.

    It and the files next to it may import each other.

    Raises a one-line ValueError if that fails or if an imported file next to it is shadowed by another module.
    """
    name = f"{USER}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    for known in (sys.modules.get(name), sys.modules.get(path.stem)):
        if known is not None and getattr(known, "__file__", None) == str(path):
            if _is_edited(known, path):
                _reload(known, path)
            return known
    spec = spec_from_file_location(name, path)
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
    _execute(module, path, partial(spec.loader.exec_module, module))
    return module


def _execute(module: ModuleType, path: Path, execute: Callable[[], object]) -> None:
    """Execute a file as a module, and keep what it and the files next to it were then; forget it if that fails."""
    try:
        with _disable_bytecode(), locate_errors(path):
            content = path.read_bytes()
            execute()
            local = collect_local_files(path, path.parent)
            _imported[module] = module.__spec__, {file: file.read_bytes() for file in local} | {path: content}
            for imported, file in iter_imports(local, path.parent):
                _check_neighbour(imported, file)
    except BaseException:
        for name in [name for name, known in sys.modules.items() if known is module]:
            del sys.modules[name]
        raise


def _is_edited(module: ModuleType, path: Path) -> bool:
    """Whether a module's file, or one next to it that it imports, was edited since its import."""
    spec, files = _imported.get(module, (None, {}))
    if spec is not module.__spec__:  # it was imported, or reloaded, by the user
        files = {path: find_imported_content(module, path) or path.read_bytes()}
        _imported[module] = module.__spec__, files
    return not all(file.is_file() and file.read_bytes() == content for file, content in files.items())


def _reload(module: ModuleType, path: Path) -> None:
    """Import a file anew, and those next to it: the same module, which a user may hold, with new content."""
    files = {str(file) for file in _imported[module][1]}
    for name, known in list(sys.modules.items()):
        if known is not module and str(getattr(known, "__file__", None)) in files:
            del sys.modules[name]
    for name in [name for name in vars(module) if not name.startswith("__")]:
        delattr(module, name)
    importlib.invalidate_caches()
    _execute(module, path, partial(importlib.reload, module))


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


def hash_uncommitted(files: Iterable[Path]) -> dict[str, str]:
    """The first 12 hex digits of the SHA-256 of user files, and of those next to them that they import, by name.

    Without the files that a checkout holds unchanged: its commit tells what they are.
    """
    every = {local for file in files for local in collect_local_files(file.resolve(), file.resolve().parent)}
    uncommitted = sorted(file for file in every if not find_last_commit(file))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in uncommitted}


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
        runs = next((how for name, how in COMMANDS.items() if load_attribute(path, name) is not None), "")
        fix = f"`lit-lazy {runs} {path}` runs what it defines" if runs else "give it one that returns a RunConfig"
        raise ValueError(f"{path}: defines no function config(); {fix}")
    with locate_errors(path):
        made = config()
    if not isinstance(made, RunConfig):
        raise ValueError(f"{path}: config() returned {short_repr(made)}; it must return a RunConfig")
    return made
