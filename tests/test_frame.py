"""Commands and examples of README and docs/extend.md run, public names import, pins agree, links resolve."""

import glob
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import yaml

from lit_lazy.table.build import read_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RUN = README + (ROOT / "docs" / "extend.md").read_text()
"""The pages whose commands and files are run."""
SOURCES = "lit_lazy", "kernels", "tests", "experiments", "ablations", "timings", "docs"
MOST_WORDS = {
    ("README.md",): 1000,
    ("docs/results/README.md",): 2500,
    ("docs/extend.md",): 1200,
    ("docs/method.md",): 6000,
    ("docs/decisions.md",): 2500,
    (
        "tests/README.md", "docs/architecture.md", "docs/scale.md", "docs/adapt.md", "docs/dashboards.md",
        "docs/api.md", "docs/tutorial.md", "kernels/README.md", "kernels/NOTES.md", "CONTRIBUTING.md", "CHANGELOG.md",
    ): 12000,
}  # fmt: skip
"""The words that pages may have together."""
PAGES = ("*.md", "kernels/*.md", "tests/*.md", "docs/*.md", "docs/results/*.md")
MOST_WORDS[tuple(str(path.relative_to(ROOT)) for pattern in PAGES for path in sorted(ROOT.glob(pattern)))] = 32000
BIN = Path(sys.executable).parent


def test_every_requirement_is_pinned_and_every_dependency_has_a_pin() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert {"pip": ["-r requirements.txt"]} in environment
    assert "python=3.11" in environment
    lines = [line for name in ("", "-test") for line in (ROOT / f"requirements{name}.txt").read_text().splitlines()]
    pinned = {m[1].lower().split("[")[0] for line in lines if (m := re.match(r"([\w.\[\]-]+)==", line))}
    assert [line for line in lines if not re.match(r"#|-c |-e |-r |[\w.\[\]-]+==", line)] == []
    project = (ROOT / "pyproject.toml").read_text()
    wanted = re.findall(r'^  "([\w-]+)', project.split("dependencies = [")[1].split("]\n\n")[0], re.M)
    assert set(wanted) - {"flash-lazy"} <= pinned
    decisions = (ROOT / "docs" / "decisions.md").read_text().lower()
    assert [name for name in sorted(pinned) if name not in decisions] == []


def find_commands() -> list[str]:
    """The pages' commands: `make ...` in code blocks, `.venv/bin/lit-lazy ...` and `lit-lazy ...` in code spans."""
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", RUN, re.M | re.S))
    made = re.findall(r"^(make [\w-]+)", blocks, re.M)
    spans = re.findall(r"`(?:\.venv/bin/)?(lit-lazy [^`]+)`", RUN)
    return list(dict.fromkeys([*made, *spans]))


EXEMPT = {"make install", "make test", "make dashboard", "make table2"}
"""The first has nothing to do here, the second runs this file, the third does not end; another test runs the last."""
LONG = {
    "make table2-text",
    "lit-lazy ablate run my_ablation.py",
    "lit-lazy ablate run rivals --base backcopy",
    "lit-lazy ablate run table1 --base stdlib",
}
"""They take the path of `make table2` with other data or all rows, or in real processes."""
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def shrink_command(command: str, runs: Path) -> list[str]:
    """The same command on a tiny experiment, with its results in `runs`."""
    words = shlex.split(command)
    if words[0] == "make":
        return [*words, "TINY=1", f"RUNS={runs}"]
    words = [re.sub(r"^0,1,2$", "0", re.sub(r"^backcopy$", "backcopy_tiny", word)) for word in words]
    runs_cells = words[1:3] in (["ablate", "run"], ["ablate", "search"])
    if runs_cells and not words[3].endswith(".py"):
        words += ["--base", "backcopy_tiny"]
    if words[1:3] == ["ablate", "run"] and "--seeds" not in words and "--dry-run" not in words:
        words += ["--seeds", "0"]
    takes_runs = words[1] == "train" or runs_cells
    return [str(BIN / words[0]), *words[1:], *(["--runs", str(runs)] if takes_runs else [])]


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=pytest.mark.long if c in LONG else ()) for c in find_commands() if c not in EXEMPT],
)
def test_a_command_of_the_pages(command: str, runs: Path, tmp_path: Path) -> None:
    if "lit-lazy new" not in command:  # which writes files of the same names
        write_examples(tmp_path)
    words = shrink_command(command, runs)
    if words[0] == "make":
        subprocess.run(words, cwd=ROOT, check=True, env=ENVIRONMENT)
    else:
        forked.check(words, cwd=tmp_path, env=ENVIRONMENT)


def test_the_pages_have_the_commands_that_are_tested() -> None:
    assert set(find_commands()) >= EXEMPT | LONG


def test_make_table2_trains_its_rows_once(runs: Path) -> None:
    """Three of them, by the only command that `make` would run, since `make` itself starts real processes."""
    words = [*shrink_command("make table2", runs), "--dry-run", "--no-print-directory"]
    (line,) = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert 'experiment("backcopy_small"' in README, "its example trains what its table does"
    command = [*shlex.split(line), "--rows", "softmax,lazy,lazy tau_init 2"]
    table = runs / "table2-backcopy_small" / "table.md"
    done, first = forked.check(command, cwd=ROOT, env=ENVIRONMENT), table.read_text()
    again = forked.check(command, cwd=ROOT, env=ENVIRONMENT)
    assert "3 cells, all finished: nothing to do" in again.stdout
    assert "Did not learn the task (in so many cells): lazy tau_init 2 (1 of 1)." in " ".join(done.stdout.split())
    assert again.stdout.endswith(done.stdout[done.stdout.index("Excess loss against lazy") :])
    assert table.read_text() == first
    measured = read_table(table.with_suffix(".json")).measures["sink/first_key_weight_non_trigger"]
    sink = {name: measured[name].mean for name in ("softmax", "lazy")}
    assert (sink["softmax"] or 0.0) > 0.3 > 0.01 > (sink["lazy"] or 0.0)


def write_examples(folder: Path) -> list[Path]:
    """The pages' Python examples on a tiny experiment, each under the file name in its first comment."""
    written = []
    for number, code in enumerate(dict.fromkeys(re.findall(r"^```python\n(.*?)^```", RUN, re.M | re.S))):
        named = re.match(r"# (my_\w+\.py)", code)
        path = folder / (named[1] if named else f"example_{number}.py")
        path.write_text(code.replace("backcopy_small", "backcopy_tiny"))
        written.append(path)
    return written


def test_examples_of_the_pages_run(tmp_path: Path) -> None:
    # The example of the Python API needs a grid: tests/report/test_report.py.
    names = [path.name for path in write_examples(tmp_path) if "from lit_lazy import" not in path.read_text()]
    kinds = {"softpick", "bias", "data", "ablation", "factorial", "question", "search"}
    assert {f"my_{kind}.py" for kind in kinds} <= set(names)
    for name in names:
        forked.check([sys.executable, name], cwd=tmp_path)


@pytest.mark.usefixtures("runs", "module_cache")
def test_the_rule_of_the_readme_is_measured_and_exported(tmp_path: Path) -> None:
    """Its block of commands, one by one: the learned parameter is drawn, and transformers loads the model."""
    write_examples(tmp_path)
    (block,) = re.findall(r"^```\n(lit-lazy train my_relu.py\n.*?)^```", README, re.M | re.S)
    for line in block.splitlines():
        words = [word for given in line.split() for word in glob.glob(given, root_dir=tmp_path) or [given]]
        forked.check([str(BIN / words[0]), *words[1:]], cwd=tmp_path, env=ENVIRONMENT)
    assert list(tmp_path.glob("runs/diagnose-*/parameters_by_head.png"))
    (tmp_path / "use.py").write_text(
        "import torch\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('my_model', trust_remote_code=True)\n"
        "assert any(name.endswith('.cut') and x.any() for name, x in model.named_parameters())\n"
        "model.generate(torch.tensor([[0, 5, 7]]), max_new_tokens=4)\n"
    )
    forked.check([sys.executable, "use.py"], cwd=tmp_path)


def test_links_of_the_documents_and_tests_and_files_that_they_name_exist() -> None:
    tests = "".join(file.read_text() for file in ROOT.glob("tests/**/test_*.py"))
    known, names = {*re.findall(r"def (test_\w+)", tests)}, " ".join(re.findall(r"(?:def|class) (\w+)", tests))
    files = {path.name for folder in SOURCES for path in (ROOT / folder).rglob("*.py")}
    for page in (page for folder in (*PAGES, "docs/results/*/*.md") for page in ROOT.glob(folder)):
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
        lost = [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]
        lost += [test for test in re.findall(r"`(tests/[\w/.]+)`", page.read_text()) if not (ROOT / test).exists()]
        lost += {*re.findall(r"`(test_\w+)`", page.read_text())} - known
        chosen = re.findall(r"-k (?:\"([\w ]+)\"|(\w+))", page.read_text())
        lost += [word for words in chosen for word in "".join(words).split(" or ") if word.lower() not in names.lower()]
        lost += {*re.findall(r"(?<![\w/])(?!my_)(\w+\.py)\b", page.read_text())} - files
        assert lost == [], page


def test_every_public_name_imports_and_has_what_its_purpose_names(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    rows = re.findall(r"^\| `((?:lit|flash)_lazy[\w.]*)` \| ([^|]+) \|([^|]+)", page, re.M)
    lines = []
    for module, names, purpose in rows:
        imported = names.replace("`", "")
        lines.append(f"from {module} import {imported}")
        for part in re.findall(r"`(\w+)`", purpose.partition(": ")[2]):
            lines.append(f"assert any(hasattr(one, {part!r}) for one in ({imported},)), {part!r}")
    assert len(rows) > 30
    (tmp_path / "names.py").write_text("\n".join(lines))
    forked.check([sys.executable, "names.py"], cwd=tmp_path)


@pytest.mark.parametrize("pages", MOST_WORDS, ids=lambda pages: f"{len(pages)} from {pages[0]}")
def test_pages_are_short(pages: tuple[str, ...]) -> None:
    assert sum(len((ROOT / page).read_text().split()) for page in pages) <= MOST_WORDS[pages]


def test_the_readme_is_short_and_shows_before_it_tells() -> None:
    assert len(README.splitlines()) <= 150
    assert README.index("![") < README.index("make install") < README.index("<!-- findings -->")
