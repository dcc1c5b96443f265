"""Help, what commands print, missing packages, completion, and the files of `lit-lazy new`."""

import ast
import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import forked
import pytest
from made_grid import MadeGrid
from mistakes import iter_commands

from flash_lazy.cpu import library
from lit_lazy.command import doctor_new_fields
from lit_lazy.command.doctor_new_fields import COMMANDS, fill_template
from lit_lazy.command.main import main, make_parser
from lit_lazy.table.build import read_table


def test_help_answers_in_a_second_without_torch() -> None:
    """The best of three, since the machine has other work."""
    code = (
        "import sys, lit_lazy.command.main as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    )
    times = []
    for _ in range(3):
        started = time.monotonic()
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        times.append(time.monotonic() - started)
    assert "train one experiment" in out
    loaded = out.splitlines()[-1].split()
    assert not {"torch", "numpy", "pandas", "matplotlib", "lightning", "mlflow", "optuna", "sqlalchemy", "rich"} & set(
        loaded
    )
    assert min(times) < 1.0


def test_the_status_of_a_grid_is_said_without_torch(tmp_path: Path) -> None:
    made = MadeGrid(tmp_path)
    for row in made.plan.rows:
        for seed in row.seeds:
            made.finish(row.variant, seed)
    code = (
        "import sys\nfrom lit_lazy.command.main import main\nassert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'lightning', 'mlflow', 'optuna'} & set(sys.modules)\n"
    )
    words = ["ablate", "status", "made", "--runs", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "4/4 cells complete" in done.stdout


MISSPELT = [
    "train nosuch.py", "tokenise nosuch", "fields nosuch", "ablate run nosuch", "ablate run table2 --base nosuch",
    "ablate search nosuch", "diagnose nosuch.ckpt", "generate own.py", "export own.py out", "generate own.zip",
    "lm-eval nosuch.ckpt", "train backcopy --threads x", "ablate run table2 --limit x", "nosuch", "ablate nosuch",
    "ablate compare nosuch nosuch", "new nosuch mine", "runs gc --runs nosuch", "import nosuch.gguf out.ckpt",
    "train backcopy --model.d_modl=3", "ablate run table2 --train.step 5", "train backcopy_tiny --keep-checkpoints",
    "ablate table nosuch", "ablate status nosuch", "train backcopy --init-from nosuch.ckpt", "evaluate .",
    "diagnose own.zip --lengths 9999999", "report nosuch --runs full", "runs rm nosuch --runs full",
    "train backcopy --logger wandb --dry-run", "ablate search lazy_search --logger wandb",
    "ablate verdicts --runs full",
]  # fmt: skip


def test_what_is_misspelt_is_said_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\nimport lit_lazy.training.logger_kinds as kinds\nfrom lit_lazy.command.main import main\n"
        "kinds.find_spec = lambda package: None\n"
        "for line in sys.argv[1:]:\n"
        "    try: status = main(line.split())\n"
        "    except SystemExit as stopped: status = stopped.code\n"
        "    heavy = {'torch', 'lightning', 'mlflow', 'optuna', 'sqlalchemy'} & set(sys.modules)\n"
        "    assert status == 2 and not heavy, (line, status, heavy)\n"
    )
    (tmp_path / "own.py").write_text("x = 1\n")
    with zipfile.ZipFile(tmp_path / "own.zip", "w"):
        pass
    for name in ("duo-tiny", "train-own", "diagnose-own", "mlartifacts"):  # trainings are no ablations
        (tmp_path / "full" / name).mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", code, *MISSPELT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("lit-lazy") >= len(MISSPELT)
    assert "--keep-checkpoints: no such option or field (did you mean --keep-checkpoint?)" in done.stderr
    assert done.stderr.count("--logger wandb: needs the package wandb; pip install 'lit-lazy[wandb]'") == 2
    assert "unknown argument '--runs'; give the folder alone: `lit-lazy ablate verdicts FOLDER`" in done.stderr
    assert done.stderr.count("'nosuch': 'full' has no such results; it has duo-tiny") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "own.py", "own.zip"]


@pytest.mark.parametrize("command", [words for words, _ in iter_commands(make_parser())], ids=" ".join)
def test_every_command_explains_itself(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: lit-lazy {' '.join(command)} ")


TRAIN = ["train", "backcopy_tiny", "--threads", "1", "--train.steps=2", "--train.warmup_steps=0"]


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("words", "streams"), [(["--help"], "1"), (TRAIN, "1"), (TRAIN, "2")])
def test_a_reader_that_ends_early_is_no_failure(words: list[str], streams: str, tmp_path: Path) -> None:
    """As in `lit-lazy train backcopy | head -1`: the work is done."""
    reader, writer = os.pipe()
    os.close(reader)
    given = {"stdout": forked.PIPE, "stderr": forked.PIPE} | {{"1": "stdout", "2": "stderr"}[streams]: writer}
    with forked.Popen([sys.executable, "-m", "lit_lazy", *words], cwd=tmp_path, text=True, **given) as process:
        os.close(writer)
        out, err = process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in (err or "")
    assert bool(out) == (streams == "2")
    assert len(list(tmp_path.glob("runs/*/*/result.json"))) == (words == TRAIN)


@pytest.mark.parametrize(("words", "status"), [("--help >&-", 0), ("ablate status nothing <&- >&- 2>&-", 2)])
def test_closed_streams_are_no_failure(words: str, status: int, tmp_path: Path) -> None:
    """What is printed is lost, as with /dev/null, and the exit status is the same."""
    command = f"{sys.executable} -m lit_lazy {words}"
    end = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" not in end.stderr
    assert end.returncode == status


def test_fields_lists_those_of_an_experiment_or_of_all_classes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fields", "backcopy"]) == 0
    out = capsys.readouterr().out
    assert "Width of the residual stream." in out
    assert "--model.attention.normaliser.tau_init" not in out, "backcopy has softmax"
    assert main(["fields", "backcopy", "--all"]) == 0
    assert "--model.attention.normaliser.tau_init=1.0" in capsys.readouterr().out


def test_child_processes_print_in_the_encoding_of_the_command() -> None:
    code = (
        "import subprocess, sys\nfrom lit_lazy.support.streams import prepare_streams\nprepare_streams()\n"
        "subprocess.run([sys.executable, '-c', r'print(\"loss \\u2193\")'], check=True)"
    )
    environment = os.environ | {"PYTHONIOENCODING": "cp1252"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"loss \\u2193\n"


def test_a_signal_after_the_work_does_not_hide_the_status() -> None:
    """Callbacks run last registered first, so this one comes after the command's."""
    code = (
        f"import atexit, os, sys\natexit.register(os.kill, os.getpid(), {int(signal.SIGTERM)})\n"
        "from lit_lazy.command.main import main\nmain(['--version'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_warning_that_is_an_error_is_one_line(monkeypatch, capsys) -> None:
    """As by PYTHONWARNINGS=error, with which MLflow's import fails."""

    def warn(*_: object) -> None:
        raise DeprecationWarning("old")

    monkeypatch.setattr("lit_lazy.command.ablate_results.list_available", warn)
    assert main(["ablate", "list"]) == 2
    assert capsys.readouterr().err == (
        "lit-lazy: PYTHONWARNINGS or -W makes a library's warning an error (DeprecationWarning: old); leave it out\n"
    )


def test_the_doctor_names_what_is_missing(runs, closed_port, capsys, monkeypatch) -> None:
    """Extras and programs are optional; a missing requirement is an error."""
    needed = ["torch>=2.11", 'absent-for-windows>=1; sys_platform == "win32"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: needed)
    assert main(["doctor", "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "absent" not in out
    assert out.endswith("Everything required is installed.\n")
    monkeypatch.setattr(doctor_new_fields, "which", lambda name: name != "chromium")
    monkeypatch.setenv(library.SWITCH, "0")
    needed += ["numpy<1", 'no-such-package>=3; extra == "wandb"', 'torch>=2; extra == "fla"']
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port}")
    assert main(["doctor", "--runs", str(runs)]) == 1
    out = capsys.readouterr().out
    errors = out.partition("errors:\n")[2]
    for said in ("--logger wandb: no-such-package is not", "the program chromium is not on", library.find_obstacle()):
        assert said in out
    assert f"  numpy: is {importlib.metadata.version('numpy')} (needed: <1); pip install -r requirements.t" in errors
    assert f"  MLFLOW_TRACKING_URI=http://127.0.0.1:{closed_port}: does not answer" in errors


def test_every_extra_has_a_use() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = text.split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    assert {line.partition(" = ")[0] for line in extras.splitlines()} == doctor_new_fields.USES.keys()


def test_bash_completes_and_other_shells_have_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("zsh", "tcsh", "bash"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert "lit-lazy" in script
    (tmp_path / "script").write_text(script)
    for typed, completed in (
        ("ablate ru", "run"),
        ("train backcopy --keep", "--keep-checkpoint"),
        ("ablate run table2_", "table2_grid"),
    ):
        code = f"source ./script; COMP_WORDS=(lit-lazy {typed}) COMP_CWORD={len(typed.split())}; _shtab_lit_lazy"
        words = ["bash", "-c", f"{code}; printf '%s\\n' \"${{COMPREPLY[@]}}\""]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [completed]


PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind == "question" else ()) for kind in COMMANDS]
)
def test_a_new_file_runs_by_the_command_that_is_printed(kind, place, runs, capsys) -> None:
    """A dry run: the pages' own files, which are the same code, are run by test_frame.py, but for the question."""
    assert main(["new", kind, f"some_{kind}"]) == 0
    said = capsys.readouterr().out.splitlines()
    words = shlex.split(said[-1].removeprefix("run it:"))
    assert words[1:] == [*COMMANDS[kind], f"some_{kind}.py"]
    whole = kind == "question"
    command = [str(Path(sys.executable).parent / "lit-lazy"), *words[1:], *([] if whole else ["--dry-run"])]
    forked.check([*command, "--runs", str(runs), "--threads", "1"], cwd=place)
    assert len(list(runs.glob(f"*some_{kind}*/**/result.json"))) == (20 if whole else 0)
    if whole:
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
