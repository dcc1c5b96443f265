"""The files of `lit-lazy new` run as they are, and agree with the examples of docs/extend.md."""

import ast
import re
import shlex
import sys
from pathlib import Path

import forked
import pytest

from lit_lazy.command.main import main
from lit_lazy.command.new import COMMANDS, fill_template
from lit_lazy.table.stored import read_table

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
OPTIONS = {"ablation": ["--dry-run"]}
"""The page's own ablation, which is the same code, is executed by tests/test_frame.py."""
CELLS = {"ablation": 0, "question": 20, "normaliser": 1, "bias": 1, "data": 1, "metric": 1}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind == "question" else ()) for kind in COMMANDS]
)
def test_a_new_file_runs_by_the_command_that_is_printed(kind, place, runs, capsys) -> None:
    assert main(["new", kind, f"some_{kind}"]) == 0
    said = capsys.readouterr().out.splitlines()
    words = shlex.split(said[-1].removeprefix("run it:"))
    assert words[1:] == [*COMMANDS[kind], f"some_{kind}.py"]
    command = [str(Path(sys.executable).parent / "lit-lazy"), *words[1:], *OPTIONS.get(kind, []), "--runs", str(runs)]
    done = forked.run([*command, "--threads", "1"], cwd=place)
    assert done.returncode == 0, done.stdout + done.stderr
    results = list(runs.glob(f"*some_{kind}*/**/result.json"))
    assert len(results) == CELLS[kind]
    if kind == "question":
        assert read_table(next(runs.glob("some_question-*/table.json"))).verdict is not None


def strip_docstrings(text: str) -> str:
    """The code of a file without its docstrings and comments."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [
                part for part in node.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
    return ast.unparse(tree)


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_page_shows_what_is_written(kind: str) -> None:
    name = "my_softpick" if kind == "normaliser" else f"my_{kind}"
    example = re.search(rf"^```python\n(# {name}\.py.*?)^```", PAGE, re.M | re.S)
    assert example
    assert strip_docstrings(fill_template(kind, name)) == strip_docstrings(example[1])


def test_a_name_is_that_of_a_class_of_nobody_else() -> None:
    """A second class called Elastic could not be told from the first in a config."""
    assert "class MyElastic(Normaliser)" in fill_template("normaliser", "elastic")
    assert "class MyNone(DataConfig)" in fill_template("data", "none")
    assert "class MySoftpickModule(" in fill_template("normaliser", "my_softpick")
