"""The code that classes need, as files that import one another within one folder.

A file of this project, or a user's, is copied with only those of its top-level statements that are needed, as they are
written; its imports of other such files become relative.
"""

import ast
import builtins
import re
import symtable
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lit_lazy.support.imported_code import OWN, get_content, locate

HERE = Path(__file__).parent
MODELLING, STAND_IN = (HERE / name for name in ("modeling_lit_lazy.py", "export_stand_in.py"))
STANDS_FOR = ("flash_lazy.api", "lit_lazy.attention.custom_rule_check", "lit_lazy.support.provenance")
"""Modules whose names a copy imports from the stand-in."""
ROOTS = {name: Path(str(spec.origin)).parents[1] for name in OWN if (spec := find_spec(name))}
"""The folders of this project's packages."""
KNOWN = {*dir(builtins), "__file__", "__name__"}
"""Names that no statement of a file defines."""
Import = ast.Import | ast.ImportFrom


def collect_sources(classes: Iterable[type]) -> dict[str, str]:
    """The files of the modelling file and of the classes of a model's parts, by name.

    Raises a one-line ValueError if a class needs code that cannot be copied.
    """
    found = _Sources()
    parts = [found.need_class(cls) for cls in classes]
    modelling = found.open(MODELLING, MODELLING.parent, "")
    for statement in modelling.body:
        found.need_statement(modelling, statement)
    files = {f"{file.name}.py": found.write(file) for file in found.files.values() if file.kept or file.needed}
    for name in sorted({part.name for part in parts}):
        files[MODELLING.name] += f"from .{name} import __name__ as _  # config.json names its class\n"
    return files


@dataclass(eq=False)
class _File:
    """A source file, imported from `root`; `name`, that of its copy as a module."""

    path: Path
    root: Path
    name: str
    lines: list[bytes] = field(init=False)
    body: list[ast.stmt] = field(init=False)
    imports: dict[str, tuple[Import, ast.alias]] = field(default_factory=dict)
    """What each name imported at the top level is."""
    definitions: dict[str, list[ast.stmt]] = field(default_factory=lambda: defaultdict(list))
    """The other top-level statements that define or change a name."""
    needed: set[str] = field(default_factory=set)
    kept: set[ast.stmt] = field(default_factory=set)

    def __post_init__(self) -> None:
        content = get_content(self.path)
        self.lines, self.body = content.splitlines(keepends=True), _parse(content)
        for statement in self.body:
            if isinstance(statement, Import):
                self.imports |= {_get_bound_name(alias): (statement, alias) for alias in statement.names}
                continue
            for name in _find_bound_names(statement):
                self.definitions[name].append(statement)

    def defines(self, name: str) -> bool:
        return name in self.imports or name in self.definitions


Target = tuple[_File, str | None]
"""What an import of a copied file means: the name that the file defines, None for the file itself."""


class _Sources:
    """Files, and what of each is needed."""

    def __init__(self) -> None:
        self.files: dict[Path, _File] = {}

    def open(self, path: Path, root: Path, prefix: str) -> _File:
        """Raises a one-line ValueError if another file's copy has the same name."""
        if path not in self.files:
            parts = path.relative_to(root).with_suffix("").parts
            name = re.sub(r"\W", "_", prefix + "_".join(part for part in parts if part != "__init__"))
            if other := next((file for file in self.files.values() if file.name == name), None):
                raise ValueError(f"{path}: its copy has the name of that of {other.path}, {name}.py; rename one")
            self.files[path] = _File(path, root, name)
        return self.files[path]

    def need_class(self, cls: type) -> _File:
        """Need a class of a model's parts; returns its file."""
        file = self._find(None, cls.__module__.split(".")) or self.open(*locate(cls), "custom_")
        if cls.__qualname__ not in file.definitions:
            raise ValueError(f"{cls.__qualname__}: must be defined at the top level of {file.path.name}")
        self._need(file, cls.__name__)
        return file

    def _find(self, importing: _File | None, parts: list[str]) -> _File | None:
        """The file of a module that is copied, as another one imports it; None for an installed module."""
        if ".".join(parts) in STANDS_FOR:
            return self.open(STAND_IN, HERE, "lit_lazy_")
        if parts[0] in ROOTS:
            root, prefix = ROOTS[parts[0]], ""
        elif importing is None or importing.name.partition("_")[0] != "custom":
            return None
        else:
            root, prefix = importing.root, "custom_"
        place = root.joinpath(*parts)
        path = next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)
        return None if path is None else self.open(path.resolve(), root, prefix)

    def _resolve(self, file: _File, node: Import, alias: ast.alias) -> Target | None:
        """What a name that a file imports is; None if it is an installed module's."""
        if file.path == STAND_IN:
            return None
        if isinstance(node, ast.Import):
            module = self._find(file, alias.name.split("."))
            if module is not None and "." in alias.name and alias.asname is None:
                raise ValueError(f"{file.path.name}: `import {alias.name}` cannot be exported; give it a name by `as`")
            return None if module is None else (module, None)
        package = file.path.parents[node.level - 1].relative_to(file.root).parts if node.level else ()
        parts = [*package, *(node.module.split(".") if node.module else [])]
        module = self._find(file, parts) if parts else None
        if module is not None and module.defines(alias.name):
            return self._trace(module, alias.name)
        if (submodule := self._find(file, [*parts, alias.name])) is not None:
            return (submodule, None)
        if module is not None:
            raise _make_unknown_error(file, alias.name)
        return None

    def _trace(self, file: _File, name: str) -> Target:
        """Where a name is defined that a file has by an import."""
        if name in file.definitions:
            return (file, name)
        return self._resolve(file, *file.imports[name]) or (file, name)

    def _need(self, file: _File, name: str) -> None:
        if name in file.needed:
            return
        file.needed.add(name)
        if name in file.imports:
            self._need_target(self._resolve(file, *file.imports[name]))
        for statement in file.definitions.get(name, ()):
            self.need_statement(file, statement)

    def _need_target(self, target: Target | None) -> None:
        if target is not None:
            self._need(target[0], target[1] or "__name__")

    def need_statement(self, file: _File, statement: ast.stmt) -> None:
        """Need a top-level statement and all that it uses."""
        if statement in file.kept:
            return
        file.kept.add(statement)
        if isinstance(statement, Import):
            for alias in statement.names:
                self._need(file, _get_bound_name(alias))
            return
        for name in _find_used_names(statement) | set(filter(file.defines, _find_quoted_words(statement))):
            if not file.defines(name) and name not in KNOWN:
                raise _make_unknown_error(file, name)
            self._need(file, name)
        for node, alias in _list_imports(statement):
            self._need_target(self._resolve(file, node, alias))
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in file.imports:
                target = self._resolve(file, *file.imports[node.value.id])
                if target is not None and target[1] is None:
                    if not target[0].defines(node.attr):
                        raise _make_unknown_error(file, f"{node.value.id}.{node.attr}")
                    self._need(target[0], node.attr)

    def write(self, file: _File) -> str:
        """The copy of a file."""
        parts = [f"# The part of {file.path.relative_to(file.root)} that the model needs.\n"]
        before: ast.stmt | None = None
        for statement in file.body:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if isinstance(statement, Import):
                aliases = [alias for alias in statement.names if _get_bound_name(alias) in file.needed]
                if text := self._write_imports(file, statement, aliases):
                    parts.append("\n" * (statement.lineno - 1 - _find_start(file, statement)) + text)
            elif statement in file.kept or (is_text and (statement is file.body[0] or before in file.kept)):
                parts.append(self._write_statement(file, statement))
            before = statement
        return "".join(parts)

    def _write_statement(self, file: _File, statement: ast.stmt) -> str:
        """A statement, with what is above it."""
        first = _find_start(file, statement)
        lines = file.lines[first : statement.end_lineno]
        inner = {(node.lineno, node.col_offset): node for node, _ in _list_imports(statement)}
        for node in (inner[place] for place in sorted(inner, reverse=True)):
            if any(self._resolve(file, node, alias) for alias in node.names):
                start, end = node.lineno - 1 - first, node.end_lineno - 1 - first  # type: ignore[operator]
                written = "; ".join(self._write_imports(file, node, node.names).splitlines()).encode()
                lines[start : end + 1] = [lines[start][: node.col_offset] + written + lines[end][node.end_col_offset :]]
        return b"".join(lines).decode()

    def _write_imports(self, file: _File, node: Import, aliases: list[ast.alias]) -> str:
        """Lines that import some of the names of an import statement."""
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            return f"{ast.unparse(node)}\n"
        lines, names = [], defaultdict(list)
        for alias in aliases:
            bound, target = _get_bound_name(alias), self._resolve(file, node, alias)
            if target is not None:
                copy, name = target
                if name is None:
                    names["."].append(f"{copy.name} as {bound}")
                    name, bound = "__name__", "_"  # transformers copies what such lines name
                names[f".{copy.name}"].append(name if name == bound else f"{name} as {bound}")
            elif isinstance(node, ast.Import):
                lines.append(ast.unparse(ast.Import([alias])))
            else:
                names[str(node.module)].append(ast.unparse(alias))
        lines += [f"from {module} import {', '.join(imported)}" for module, imported in names.items()]
        return "".join(f"{line}\n" for line in lines)


@cache
def _parse(content: bytes) -> list[ast.stmt]:
    """The top-level statements of a file. Cached, so that what is found of a statement can be."""
    return ast.parse(content).body


def _find_start(file: _File, statement: ast.stmt) -> int:
    """Index of the first line of a statement, with the comments and empty lines above it."""
    first = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", ()))) - 1
    while first and not file.lines[first - 1].split(b"#")[0].strip():
        first -= 1
    return first


def _get_bound_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


@cache
def _list_imports(statement: ast.stmt) -> list[tuple[Import, ast.alias]]:
    """The names imported anywhere in a statement."""
    return [(node, alias) for node in ast.walk(statement) if isinstance(node, Import) for alias in node.names]


@cache
def _find_bound_names(statement: ast.stmt) -> set[str]:
    """Names that a top-level statement defines, and those whose objects it changes."""
    tables = _list_scopes(statement)
    names = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    for table in tables[1:]:
        names |= {x.get_name() for x in table.get_symbols() if x.is_declared_global() and x.is_assigned()}
    changed = getattr(statement, "targets", [getattr(statement, "target", getattr(statement, "value", None))])
    for node in changed if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr) else ():
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            node = node.func if isinstance(node, ast.Call) else node.value
        if isinstance(node, ast.Name):
            names.add(node.id)
    return names


@cache
def _find_used_names(statement: ast.stmt) -> set[str]:
    """Names of the file that a top-level statement uses."""
    symbols = (symbol for table in _list_scopes(statement) for symbol in table.get_symbols())
    return {symbol.get_name() for symbol in symbols if symbol.is_global() and symbol.is_referenced()}


@cache
def _find_quoted_words(statement: ast.stmt) -> set[str]:
    """Words in the texts of annotations, where classes may be quoted."""
    hints = [getattr(node, name, None) for node in ast.walk(statement) for name in ("annotation", "returns")]
    parts = [part for hint in hints if isinstance(hint, ast.AST) for part in ast.walk(hint)]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return {word for text in texts for word in re.findall(r"\w+", text)}


def _list_scopes(statement: ast.stmt) -> list[symtable.SymbolTable]:
    """The scope of a statement, and all scopes within."""
    tables = [symtable.symtable(ast.unparse(statement), "statement", "exec")]
    for table in tables:
        tables += table.get_children()
    return tables


def _make_unknown_error(file: _File, name: str) -> ValueError:
    fix = "import it by its name from the file that defines it"
    return ValueError(f"{file.path.name}: uses {name}, which cannot be exported, since nothing defines it there; {fix}")
