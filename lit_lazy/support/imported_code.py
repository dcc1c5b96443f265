"""The code of users' classes as it was imported, which tells one training from another.

A process imports a file once, so its content at the import is what runs, whatever the file holds later.
"""

import ast
import copy
import inspect
import symtable
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

SETTINGS = ("config", "ablation", "search", "question")
"""Names that a file exports. A cell's key includes their values, so it omits their code if no class reads them."""
OWN = ("lit_lazy", "flash_lazy")
"""This project's packages, which may be next to a user's file without being part of it."""

_imported: dict[Path, bytes] = {}
"""Content of each user's file, and of the local files that it imports, at its import."""


def keep_file(cls: type) -> None:
    """Keep the content of the files of a class that is being defined, if it is a user's."""
    if cls.__module__.partition(".")[0] not in OWN:
        with suppress(ValueError):  # without a file, raised again where its key is asked for
            keep_files(*locate(cls))


def keep_files(path: Path, root: Path) -> None:
    """Keep the content of a file that is about to be imported, and of the files below `root` that it imports.

    A file that is known keeps its first content, and so do those that it imports.
    """
    if path not in _imported:
        for file in find_local_files(path, root).values():
            _imported.setdefault(file, get_content(file))


def forget_unimported() -> None:
    """Forget the files whose import has failed: they may be edited and imported again."""
    imported = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    for file in [file for file in _imported if str(file) not in imported]:
        del _imported[file]


def read_code(cls: type) -> str:
    """The code of a user's class when it was imported: its file and all local files that this imports, at any depth.

    Omits comments, docstrings, layout and the definitions of exported settings. Raises ValueError if a file cannot be
    read or defines a class twice, or if the class is another than the one of its name at the top of its file.
    """
    path, root = locate(cls)
    for name, code in ((name, f.__code__) for name, f in vars(cls).items() if inspect.isfunction(f)):
        # What a dataclass adds, all with underscores, comes from no file or from the standard library.
        if not (_is_known(Path(code.co_filename).resolve()) or name.startswith("__")):
            raise _make_unreadable_error(f"{cls.__name__}.{name}")
    defined: Any = sys.modules[cls.__module__]
    for name in cls.__qualname__.split("."):
        defined = getattr(defined, name, None)
    if defined is not cls:
        problem = "is not what its file defines under this name, so the file's code does not tell what it does"
        fix = "define it at the top of a file, with fields for what differs; if it is reloaded, make the config anew"
        raise ValueError(f"{cls.__name__}: {problem}; {fix}")
    files = sorted({*find_local_files(path, root).values()})
    return "\n\n".join(_select_code(get_content(x), x.name, SETTINGS if x == path else ()) for x in files)


def locate(cls: type) -> tuple[Path, Path]:
    """The file of a user's class, and the folder from which it is imported. Raises ValueError if it has no .py file."""
    module = sys.modules.get(cls.__module__)
    path = Path(getattr(module, "__file__", None) or "").resolve()
    if path.suffix != ".py" or not _is_known(path):
        raise _make_unreadable_error(cls.__name__)
    spec = getattr(module, "__spec__", None)
    name = spec.name if spec else cls.__module__  # of `python -m`, the module is __main__
    return path, path.parents[name.count(".") + (path.name == "__init__.py")]


def require_unedited(path: Path, root: Path) -> None:
    """Raise a one-line ValueError if the code of a file, or of one that it imports, changed since its import."""
    for file in find_local_files(path, root).values():
        then = get_content(file)
        try:
            now = file.read_bytes()
            edited = now != then and ast.unparse(_parse(now)) != ast.unparse(_parse(then))
        except (OSError, SyntaxError, ValueError):  # moved away, or not finished yet
            edited = True
        if edited:
            fix = "start a new process (in a notebook: restart the kernel)"
            raise ValueError(f"{file}: was edited after it was imported; {fix}")


def find_local_files(path: Path, root: Path) -> dict[str, Path]:
    """A file, by the name "", and by their modules' names the files below `root` that it imports, at any depth."""
    found, ahead = {"": path}, [path]
    while ahead:
        for name in sorted({*_iter_imported_names(ahead.pop(), root)} - {*found}):
            place = root.joinpath(*name.split("."))
            if file := next(filter(_is_known, (place / "__init__.py", place.with_suffix(".py"))), None):
                found[name] = file.resolve()
                ahead.append(found[name])
    return found


def read_constants(name: str, folder: Path) -> dict[str, Any]:
    """What the class of a name assigns itself, in a user's imported file, else in one of a folder; {} if there is none.

    Its code is read: to import it takes torch, which takes seconds.
    """
    for file in (*_imported, *sorted(folder.glob("*.py"))):
        for node in _parse(get_content(file)).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return dict(_iter_constants(node))
    return {}


def _iter_constants(cls: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for node in cls.body:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = zip(targets, values, strict=False)
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                pairs = iter([(target, node.value)])
            case _:
                continue
        yield from ((at.id, x.value) for at, x in pairs if isinstance(at, ast.Name) and isinstance(x, ast.Constant))


def _iter_imported_names(path: Path, root: Path) -> Iterator[str]:
    """Dotted names, from `root`, of all modules that a file's import statements may refer to."""
    for node in ast.walk(_parse(get_content(path))):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = path.parents[node.level - 1].relative_to(root).parts if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            named = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
        else:
            continue
        for parts in (name.split(".") for name in named):
            if parts[0] not in OWN:
                yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


@cache
def _select_code(content: bytes, name: str, left_out: tuple[str, ...]) -> str:
    """The code of a file without the top-level definitions of some names that its classes do not read, however
    indirectly: editing a row changes no class.

    Raises a one-line ValueError if a class is defined twice: the code is the same with either.
    """
    body = _parse(content).body
    ahead: list[ast.stmt] = [node for node in body if isinstance(node, ast.ClassDef)]
    names = [node.name for node in ahead if isinstance(node, ast.ClassDef)]
    if twice := [one for one in names if names.count(one) > 1]:
        raise ValueError(f"{name}: defines the class {twice[0]} twice, and a key cannot tell which; rename one")
    read: set[str] = set()
    while ahead:
        new = _list_global_names(ahead) - read
        read |= new
        ahead = [node for node in body if _get_defined_name(node) in new]
    unread = {*left_out} - read
    return ast.unparse(ast.Module([node for node in body if _get_defined_name(node) not in unread], []))


def _get_defined_name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.FunctionDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else None


def _list_global_names(nodes: list[ast.stmt]) -> set[str]:
    """The names of the module that some of its statements read."""
    module = copy.deepcopy(ast.Module(nodes, []))
    for node in ast.walk(module):
        if getattr(node, "body", None) == []:  # `_parse` left nothing of it, which is no Python
            node.body = [ast.Pass()]  # type: ignore[attr-defined]
    found, tables = set[str](), [symtable.symtable(ast.unparse(module), "", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        top = table.get_type() == "module"
        found |= {x.get_name() for x in table.get_symbols() if x.is_referenced() and (top or x.is_global())}
    return found


@cache
def _parse(content: bytes) -> ast.Module:
    """The statements of a file that have an effect: without docstrings, also those of fields, `...` and `pass`."""
    module = ast.parse(content)
    for node in ast.walk(module):
        for _, parts in ast.iter_fields(node):
            if isinstance(parts, list):
                texts = [x for x in parts if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
                parts[:] = [part for part in parts if not isinstance(part, ast.Pass) and part not in texts]
    return module


def get_content(file: Path) -> bytes:
    """The content of a file at its import; that of now if it is not imported."""
    return _imported[file] if file in _imported else file.read_bytes()


def _is_known(file: Path) -> bool:
    return file in _imported or file.is_file()


def _make_unreadable_error(name: str) -> ValueError:
    return ValueError(f"{name}: its source cannot be read, but is part of the key; define it in a .py file")
