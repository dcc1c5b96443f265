"""The source of users' classes as it was imported, which tells one training from another."""

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from symtable import SymbolTable, symtable
from types import ModuleType
from weakref import WeakKeyDictionary

SETTINGS = ("config", "ablation", "search", "question")
"""Names that a file exports. A cell's key includes their values, so it omits their source if no class reads them."""
OWN = ("lit_lazy", "flash_lazy")
"""This project's packages, which may be next to a user's file without being part of it."""
USER = "lit_lazy_user_"
"""Prefix of the module names of users' files."""

CONSTANTS = (bool, int, float, complex, str, bytes, tuple)
"""Types whose values in memory are compared with those of the file."""

_imported: WeakKeyDictionary[type, dict[Path, bytes]] = WeakKeyDictionary()
"""Content of the files of each user's class: of its own when it was defined, of others when they were first read."""
_seen: dict[Path, tuple[ModuleSpec, bytes]] = {}
"""The import of each other file, and its content when it was first read since: a reload makes another spec."""


def keep_file(cls: type) -> None:
    """Keep the content of the file that is being imported and defines a user's class."""
    path = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "").resolve()
    if path.suffix == ".py" and path.is_file() and cls.__module__.partition(".")[0] not in OWN:
        _imported[cls] = {path: path.read_bytes()}


def find_imported_content(module: ModuleType, path: Path) -> bytes | None:
    """The content of a module's file when a class of it was defined; None if it defines no class of settings."""
    kept = (_imported.get(cls, {}).get(path) for cls in vars(module).values() if isinstance(cls, type))
    return next(filter(None, kept), None)


def read_source(cls: type) -> str:
    """The source of a user's class when it was imported: its file and all local files that this imports, at any depth.

    Omits the definitions of exported settings. Raises ValueError if a file cannot be read, or if a method uses a
    variable of the function around the class, whose value no source tells.
    """
    try:
        path = Path(inspect.getfile(cls)).resolve()
    except (TypeError, OSError):
        path = Path()
    if path not in _imported.get(cls, {}) and not path.is_file():
        raise ValueError(f"{cls.__name__}: its source cannot be read, but is part of the key; define it in a .py file")
    for name, function in vars(cls).items():
        if not inspect.isfunction(function):
            continue
        outer = sorted({*function.__code__.co_freevars} - {"__class__"})
        file = Path(function.__code__.co_filename).resolve()
        # What a dataclass adds, all with underscores, comes from no file or from the standard library.
        if not (file == path or file.is_file() or name.startswith("__")):
            raise ValueError(
                f"{cls.__name__}.{name}: its source cannot be read, but is part of the key; define it in a .py file"
            )
        if outer and file == path:
            raise ValueError(
                f"{cls.__name__}.{function.__name__}: uses {outer[0]!r} of the function around the class, which is no "
                "part of the key; make it a field, or define it at the top of the file"
            )
    return "\n\n".join(text for _, text, _ in _iter_imported(cls, path))


def require_unedited(cls: type) -> None:
    """Raise a one-line ValueError if a file of `read_source`, which can be read, was edited since it was imported."""
    for file, text, left_out in _iter_imported(cls, Path(inspect.getfile(cls)).resolve()):
        try:
            edited = _keep_statements(file.read_bytes(), file, left_out) != text
        except (OSError, SyntaxError, ValueError):  # moved away, or not finished yet
            edited = True
        if edited:
            raise ValueError(f"{cls.__name__}: {file.name} was edited after it was imported; {_tell_reload(cls, file)}")
    if problem := find_change_in_memory(sys.modules.get(cls.__module__), _imported[cls]):
        raise ValueError(
            f"{cls.__name__}: {problem}, and the key would be that of the file; make it a field of the class, or edit "
            "the file"
        )


def find_change_in_memory(module: ModuleType | None, contents: Mapping[Path, bytes]) -> str | None:
    """What a running program gave a user's module instead of what its file says; None if nothing was found.

    Considers numbers and texts of the module that its classes read, and numbers, texts and functions of its classes.
    """
    path = Path(getattr(module, "__file__", None) or "").resolve()
    if module is None or path not in contents:
        return None
    text = contents[path].decode()
    body = ast.parse(text).body
    told, changing = _read_constants(body)
    for name in sorted(_find_read_names(text)):
        value = vars(module).get(name)
        if type(value) in CONSTANTS and module.__name__ == "__main__" and name in changing:
            return f"{name}, which its code reads, changes while {path.name} runs"
        if _differs(value, told.get(name, value)):
            return f"{name} was set to {value!r} in memory"
    for node in (part for part in body if isinstance(part, ast.ClassDef)):
        told, _ = _read_constants(node.body)
        for name, value in getattr(vars(module).get(node.name), "__dict__", {}).items():
            replaced = inspect.isfunction(value) and value.__globals__ is not vars(module)
            if replaced and value.__globals__.get("__name__") == "__main__":
                return f"{node.name}.{name} was replaced in memory"
            if _differs(value, told.get(name, value)):
                return f"{node.name}.{name} was set to {value!r} in memory"
    return None


def _find_read_names(text: str) -> set[str]:
    """Names of a module that its classes read, directly or in functions of the module."""
    tables = symtable(text, "", "exec").get_children()
    ahead = ["lambda", *(table.get_name() for table in tables if table.get_type() == "class")]
    found: set[str] = set()
    while ahead:
        name = ahead.pop()
        new = {read for table in tables if table.get_name() == name for read in _iter_globals(table)} - found
        found |= new
        ahead += new
    return found


def _iter_globals(table: SymbolTable) -> Iterator[str]:
    """The names of its module that a class or function reads."""
    yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced())
    for child in table.get_children():
        yield from _iter_globals(child)


def _differs(value: object, told: object) -> bool:
    return type(value) in CONSTANTS and (type(value), value) != (type(told), told)


def _read_constants(body: Iterable[ast.stmt]) -> tuple[dict[str, object], set[str]]:
    """The constants that statements assign or import, by name, and the names that they assign more than once."""
    told: dict[str, object] = {}
    stored = Counter[str]()
    for node in body:
        if isinstance(node, ast.ImportFrom) and not node.level:
            source = sys.modules.get(node.module or "")
            told |= {part.asname or part.name: getattr(source, part.name, None) for part in node.names}
            told = {name: value for name, value in told.items() if type(value) in CONSTANTS}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
        stored.update(names * (2 if isinstance(node, ast.For | ast.While | ast.AugAssign) else 1))
        for name in names:
            told.pop(name, None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _get_defined_name(node):
            with suppress(ValueError):
                told[names[0]] = ast.literal_eval(node.value)
    return told, {name for name, times in stored.items() if times > 1}


def _iter_imported(cls: type, path: Path) -> Iterator[tuple[Path, str, Sequence[str]]]:
    """Each file of a class that `path` defines, its statements when it was imported, and the names left out of them."""
    # The folder from which its module is imported.
    root = path.parents[cls.__module__.count(".") + (path.name == "__init__.py")]
    kept = _imported.setdefault(cls, {})

    def read(file: Path) -> bytes:
        if file not in kept:
            kept[file] = _get_imported(file, root)
        return kept[file]

    for file in sorted(collect_local_files(path, root, read)):
        left_out = SETTINGS if file == path else ()
        yield file, _keep_statements(read(file), file, left_out), left_out


def _get_imported(file: Path, root: Path) -> bytes:
    """The content of a file below `root` when it was first read after its import; that of now if it is not imported."""
    name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    spec = getattr(sys.modules.get(name), "__spec__", None)
    if spec is None:
        return file.read_bytes()
    if file not in _seen or _seen[file][0] is not spec:
        _seen[file] = spec, file.read_bytes()
    return _seen[file][1]


def _tell_reload(cls: type, file: Path) -> str:
    if cls.__module__.startswith(USER):
        return f"make the config anew by lit_lazy.config.experiment({inspect.getfile(cls)!r}), or restart Python"
    first = "" if file.stem == cls.__module__.rpartition(".")[2] else f"importlib.reload {file.stem}, then "
    return f"{first}importlib.reload({cls.__module__}) and take {cls.__name__} from it again, or restart Python"


def collect_local_files(path: Path, root: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> set[Path]:
    """A file and the files below `root` that it imports, directly or indirectly."""
    found, ahead = {path}, [path]
    while ahead:
        new = {file for _, file in iter_imports({ahead.pop()}, root, read)} - found
        found |= new
        ahead += new
    return found


def iter_imports(
    files: Iterable[Path], root: Path, read: Callable[[Path], bytes] = Path.read_bytes
) -> Iterator[tuple[str, Path]]:
    """Name and file of each module below `root` that the files import."""
    for path in files:
        for name in _iter_imported_names(path, root, read(path)):
            place = root.joinpath(*name.split("."))
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file.is_file() and name.partition(".")[0] not in OWN:
                    yield name, file.resolve()


def _iter_imported_names(path: Path, root: Path, content: bytes) -> Iterator[str]:
    """Dotted names, from `root`, of all modules that a file's import statements may refer to."""
    for node in ast.walk(ast.parse(content, str(path))):
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


def _keep_statements(content: bytes, path: Path, left_out: Sequence[str]) -> str:
    """The top-level statements of a file without the definitions of some names: editing a row changes no class.

    Raises a one-line ValueError if a class is defined twice: the text is the same with either.
    """
    text = content.decode()
    lines, kept, body = text.splitlines(), [], ast.parse(text, str(path)).body
    names = [node.name for node in body if isinstance(node, ast.ClassDef)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path.name}: defines the class {twice[0]} twice, and a key cannot tell which; rename one")
    used = {
        part.id
        for node in body
        if isinstance(node, ast.ClassDef)
        for part in ast.walk(node)
        if isinstance(part, ast.Name)
    }
    for node in body:
        name = _get_defined_name(node)
        if name not in left_out or (name in used and not isinstance(node, ast.FunctionDef)):
            first = min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))
            kept += lines[first - 1 : node.end_lineno]
    return "\n".join(kept)


def _get_defined_name(node: ast.stmt) -> str | None:
    """The name that a statement defines, if it is a function or an assignment of one name."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else None
