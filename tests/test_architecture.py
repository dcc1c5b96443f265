"""Compares the rooms and their imports, including late ones, with docs/architecture.md."""

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
ROOMS = (
    "flash_lazy", "support", "attention", "testing", "data", "optim", "config", "model", "measure", "training",
    "tracking", "table", "figures", "grid", "api", "report", "command",
)  # fmt: skip
"""From the bottom up: a room imports only from the rooms before it."""
ONLY = {
    "mlflow": ("lit_lazy/tracking/",),
    "optuna": ("lit_lazy/grid/",),
    "triton": ("kernels/flash_lazy/fused/", "kernels/bench/"),
    "ray": ("lit_lazy/grid/ray_pool.py", "lit_lazy/command/ablate_run.py"),
    "datasets": ("lit_lazy/data/",),
    "gguf": ("lit_lazy/model/import_gguf.py",),
    "tokenizers": ("lit_lazy/data/",),
    "transformers": ("lit_lazy/model/import_", "lit_lazy/model/modeling_lit_lazy.py", "kernels/examples/"),
    "safetensors": ("lit_lazy/model/export_folder.py", "lit_lazy/model/import_"),
    "torchmetrics": ("lit_lazy/measure/",),
    "matplotlib": ("lit_lazy/figures/", "lit_lazy/report/", "lit_lazy/api.py", "kernels/bench/"),
    "lm_eval": ("lit_lazy/measure/lm_eval/",),
    "lightning": ("lit_lazy/training/", "lit_lazy/tracking/", "lit_lazy/grid/", "timings/"),
}
"""Where a package may be imported, at the top of a file or later."""
BACKENDS = ("reference", "chunked", "cpu", "fused", "rules")
SHARED = {"call", "scores", "tiling", "vmap"}
"""Modules of their room that the backends may import."""
WAYS = {"A query tensor": 7, "A cell": 12, "A verdict": 6, "An override": 5, "A weight": 8}
"""The most files of each."""


@cache
def files() -> dict[str, Path]:
    """Every module of both distributions and of the benchmarks, by dotted name."""
    found = [
        path
        for folder in ("lit_lazy", "kernels", "timings")
        for path in (ROOT / folder).rglob("*.py")
        if "build" not in path.parts
    ]
    return {module_name(path): path for path in found}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "kernels" else parts).removesuffix(".__init__")


@cache
def walk(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


@cache
def read_imports(path: Path) -> set[str]:
    """Dotted names that the import statements anywhere in a file may refer to."""
    names = set()
    for node in walk(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module_name(path.with_name("__init__.py"))
            source = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{source}.{alias.name}" for alias in node.names}
    return names


@cache
def graph() -> dict[str, set[str]]:
    """The project's modules that each module imports."""
    known = files()
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        found[module] = set()
        for name in read_imports(path):
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name and name != module:
                found[module].add(name)
    return found


def room(module: str) -> str | None:
    """The room of a module; None for `lit_lazy` itself (its version, its start) and for the benchmarks."""
    package, _, rest = module.partition(".")
    if package == "flash_lazy":
        return package
    return rest.partition(".")[0] or None if package == "lit_lazy" and rest != "__main__" else None


@cache
def arrows() -> dict[str, set[str]]:
    """The rooms that each room imports from."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, others in graph().items():
        for other in others:
            here, there = room(module), room(other)
            if here and there and here != there:
                found[here].add(there)
    return found


def read_drawn_arrows() -> dict[str, set[str]]:
    """The arrows in the page's picture."""
    picture = re.search(r"```mermaid\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert picture, "the page has no picture"
    found: dict[str, set[str]] = defaultdict(set)
    for here, there in re.findall(r"^\s*(\w+) --> ([\w &]+)$", picture[1], re.MULTILINE):
        found[here] |= set(there.split(" & "))
    return found


def transitive_reduction(whole: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that no chain of other arrows implies."""

    def reach(start: str) -> set[str]:
        return {start}.union(*(reach(there) for there in whole.get(start, ())))

    return {
        here: {there for there in others if not any(there in reach(other) for other in others - {there})}
        for here, others in whole.items()
    }


def test_no_circle() -> None:
    """Among files; a cycle of rooms would contain an upward arrow."""
    try:
        tuple(TopologicalSorter(graph()).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_every_folder_is_a_room() -> None:
    found = {path.name for path in (ROOT / "lit_lazy").iterdir() if (path / "__init__.py").exists()}
    found |= {path.name for path in (ROOT / "lit_lazy").glob("*.py")}
    assert found == set(ROOMS) - {"api", "flash_lazy", "testing"} | {
        *("__init__.py", "__main__.py", "api.py", "testing.py")
    }


def test_no_arrow_upwards() -> None:
    pairs = [(here, there) for here, others in arrows().items() for there in others]
    assert [(here, there) for here, there in pairs if ROOMS.index(there) > ROOMS.index(here)] == []
    product = {other.split(".")[0] for module, others in graph().items() if room(module) for other in others}
    assert not product & {"bench", "timings"}


def test_rooms_named_by_a_string_are_on_the_page() -> None:
    """A base class may name the room of its leaves, an arrow without an import."""
    named = {
        (str(path.relative_to(ROOT)), node.value.value)
        for path in files().values()
        for node in walk(path)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "LEAVES_IN"
    }
    assert named == set(re.findall(r"^- `([\w/.]+)` names `([\w.]+)`", PAGE.read_text(), re.MULTILINE))


@pytest.mark.parametrize("package", ONLY)
def test_packages_are_imported_where_they_belong(package: str) -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in files().values()
        if any(name.partition(".")[0] == package for name in read_imports(path))
    }
    assert users, f"nothing imports {package}: drop it from ONLY"
    assert not [user for user in users if not user.startswith(ONLY[package])]


def test_tables_and_reports_are_made_without_mlflow() -> None:
    """Nor is it imported for them, which takes seconds."""
    reached, new = (
        set[str](),
        {"lit_lazy.report.ablation_page", "lit_lazy.grid.reused_results", "lit_lazy.grid.progress"},
    )
    while new:
        reached |= new
        new = {other for module in new for other in graph()[module]} - reached
    packages = {name.partition(".")[0] for module in reached for name in read_imports(files()[module])}
    assert not packages & {"mlflow", "optuna"}


def test_backends_do_not_know_each_other() -> None:
    for module, others in graph().items():
        here = module.removeprefix("flash_lazy.").partition(".")[0]
        if module.startswith("flash_lazy.") and here in BACKENDS:
            there = {other.removeprefix("flash_lazy.").partition(".")[0] for other in others}
            assert there <= {here, *SHARED}, module


def test_one_meaning_per_name() -> None:
    """No two public classes have the same name."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in files().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_the_picture_shows_the_imports() -> None:
    wanted = transitive_reduction(arrows())
    lines = [f"  {here} --> {' & '.join(sorted(wanted[here]))}" for here in reversed(ROOMS) if wanted.get(here)]
    assert read_drawn_arrows() == wanted, "docs/architecture.md should draw:\n" + "\n".join(lines)


@pytest.mark.parametrize("title", WAYS)
def test_a_way_leads_from_file_to_file(title: str) -> None:
    """Each file imports the next or vice versa: one side must refer to what is passed on."""
    pattern = r"^### (.+?) \(at most (\d+) files\)\n(.*?)(?=^#|\Z)"
    ways = {name: (int(most), body) for name, most, body in re.findall(pattern, PAGE.read_text(), re.M | re.S)}
    assert {name: most for name, (most, _) in ways.items()} == WAYS
    way = re.findall(r"^\d+\. `([\w/.]+)`", ways[title][1], re.MULTILINE)
    assert 2 < len(way) <= WAYS[title]
    known = graph()

    def knows(module: str, other: str) -> bool:
        """Whether a module imports another, directly or through its package."""
        return not known[module].isdisjoint({other, other.rpartition(".")[0]})

    for here, there in pairwise(way):
        a, b = (module_name(ROOT / path) for path in (here, there))
        assert knows(a, b) or knows(b, a), f"{here} and {there} do not know each other"
