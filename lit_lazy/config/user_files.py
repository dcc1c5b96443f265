"""Imports users' Python files: experiments (`config()`) and ablations (`ablation`)."""

import hashlib
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.support.error_messages import describe_exception, one_line, short_repr
from lit_lazy.support.imported_code import find_local_files, forget_unimported, keep_files, require_unedited
from lit_lazy.support.names_to_paths import find
from lit_lazy.support.provenance import find_last_commit

COMMANDS = {"question": "ablate run", "ablation": "ablate run", "search": "ablate search"}
"""The command for a file that defines no experiment, by the name that it defines."""
USER = "lit_lazy_user_"
"""Prefix of the module names of users' files."""


def load_module(path: Path) -> ModuleType:
    """Import a file by its path, once per process. It and the files next to it may import each other.

    Raises a one-line ValueError if that fails, if an imported file next to it is shadowed by another module, or if one
    of these files was edited after its import.
    """
    name = f"{USER}{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    known = [sys.modules.get(name), sys.modules.get(path.stem)]
    module = next((module for module in known if getattr(module, "__file__", None) == str(path)), None)
    with locate_errors(path):
        keep_files(path, path.parent)
        module = module or _import(path, name)
    require_unedited(path, path.parent)
    return module


def _import(path: Path, name: str) -> ModuleType:
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError("cannot be imported as Python")
    module = module_from_spec(spec)
    # At the end: a file called queue.py must not shadow the standard library's.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Registered before it runs, because dataclasses look up their module; also under its plain name if that resolves to
    # this file, so that importing it does not define its classes again.
    plain = path.stem.isidentifier() and path.stem not in sys.modules and find_spec(path.stem)
    names = [name, path.stem] if plain and plain.origin == str(path) else [name]
    sys.modules.update(dict.fromkeys(names, module))
    # No bytecode: it would be used for an edited file of the same size and time.
    former, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
        for imported, file in find_local_files(path, path.parent).items():
            found = getattr(sys.modules.get(imported), "__file__", None)
            if found is not None and Path(found).resolve() != file:
                fix = f"which is {found} and not {file.name} next to it; rename {file.name}"
                raise ValueError(f"imports {imported!r}, {fix}")
    except BaseException:
        for known in names:
            sys.modules.pop(known, None)
        forget_unimported()
        raise
    finally:
        sys.dont_write_bytecode = former
    return module


def hash_uncommitted(files: Iterable[Path]) -> dict[str, str]:
    """The first 12 hex digits of the SHA-256 of user files, and of those next to them that they import, by name.

    Without the files that a checkout holds unchanged: its commit tells what they are.
    """
    paths = [file.resolve() for file in files]
    every = {local for path in paths for local in find_local_files(path, path.parent).values()}
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
        # The last line of this file that the exception passed through, as in `line 3: NameError: ...`.
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        # This project's own messages are ValueErrors.
        text = one_line(error) if type(error) is ValueError else describe_exception(error)
        raise ValueError(f"{path}: line {line}: {text}" if line else f"{path}: {text}") from error


def experiment(name: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """The config of an experiment, by name or by the path of its file, with new values by dotted path.

    Raises ValueError if it does not exist, was edited after this process imported it, or has no such field.
    """
    return replace_at(load_experiment(find("experiments", name)), changes or {})


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
