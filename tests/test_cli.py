"""The command line: instant help, one line for a mistake and nothing created, status 2."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lit_lazy.cli import main
from lit_lazy.tracking import default_uri, experiment_names

BIN = Path(sys.executable).parent


def test_help_answers_in_a_second_without_torch() -> None:
    """The best of three, since the machine has other work."""
    code = "import sys, lit_lazy.cli as c\ntry:\n  c.main(['--help'])\nexcept SystemExit: pass\nprint(*sys.modules)"
    times = []
    for _ in range(3):
        started = time.monotonic()
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        times.append(time.monotonic() - started)
    assert "train one experiment" in out
    loaded = out.splitlines()[-1].split()
    assert not {"torch", "lightning", "mlflow", "optuna", "rich", "jsonargparse"} & set(loaded)
    assert min(times) < 1.0


@pytest.mark.parametrize("command", [["train"], ["fields"], ["ablate", "run"], ["ablate", "table"], ["dashboard"]])
def test_every_command_explains_itself(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    assert "--" in capsys.readouterr().out


def test_fields_lists_every_option_with_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fields", "backcopy"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--model.d_model" in out
    assert "Width of the residual stream." in out
    assert "Seed of the initial weights and of the batch order." in out


def test_list_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "list"]) == 0
    out = capsys.readouterr().out
    for name in ("table2", "table2_grid", "backcopy", "stdlib_tiny"):
        assert f"  {name} " in out


WRONG = [
    (["train", "nothing"], "experiment 'nothing': unknown; there are backcopy"),
    (["train", "nothing.py"], "experiment 'nothing.py': no such file"),
    (["train", "backcopy_tiny", "--model.d_modl=3"], "--model.d_modl"),
    (["train", "backcopy_tiny", "--model.d_model=three"], "d_model"),
    (["train", "backcopy_tiny", "--model.n_heads=3"], "model.n_heads=3: must divide model.d_model=16"),
    (["train", "backcopy_tiny", "--train.steps=0"], "train.steps=0: must be a whole number of at least 1"),
    (["train", "backcopy_tiny", "--train.precision=bf16-true"], "precision"),
    (["train", "backcopy_tiny", "--train.batch_size=1000"], "1000"),
    (["train", "backcopy_tiny", "--model.attention.bias=LearnedBias", "--model.attention.bias.length=0"], "length=0"),
    (
        [
            "train",
            "backcopy_tiny",
            "--model.attention.normaliser=Elastic",
            "--model.attention.normaliser.tau_init=nan",
        ],
        "tau_init",
    ),
    (
        [
            "train",
            "backcopy_tiny",
            "--model.attention.normaliser=Elastic",
            "--model.attention.normaliser.threshold=constant",
        ],
        "take a value below 1",
    ),
    (["fields", "backcopy", "extra"], "unknown argument 'extra'"),
    (["ablate", "run", "nothing"], "ablation 'nothing': unknown; there are table2"),
    (["ablate", "run", "table2", "--rows", "nothing"], "--rows 'nothing': table2 has no such row"),
    (["ablate", "run", "table2", "--base", "nothing"], "experiment 'nothing': unknown"),
    (["ablate", "run", "table2", "--base", "backcopy_tiny", "--seed=3"], "--seeds"),
    (
        ["ablate", "run", "table2", "--base", "backcopy_tiny", "--model.attention.bias=Alibi"],
        "sets model.attention.bias itself",
    ),
    (["ablate", "table", "nothing"], "ablation 'nothing': unknown"),
    (["ablate", "table", "table2"], "holds no such experiment"),
    (["dashboard"], "holds no runs yet"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_a_mistake_is_one_line_and_creates_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("lit-lazy: ")
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablate", "run", "table2", "--workers", "0"], "'0': must be a whole number of at least 1"),
        (["ablate", "run", "table2", "--workers", "-1"], "'-1': must be a whole number of at least 1"),
        (["ablate", "run", "table2", "--seeds", "a"], "'a': must be whole numbers separated by commas"),
        (["ablate", "run", "table2", "--rows", ""], "'': must be names separated by commas"),
        (["train", "backcopy_tiny", "--runs", __file__], "is a file, must be a folder"),
        (["ablate", "run"], "the following arguments are required: NAME"),
        (["trian", "backcopy"], "invalid choice: 'trian'"),
    ],
)
def test_a_mistake_in_an_option_is_told_by_the_parser(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


BROKEN = {
    "syntax": ("def config(:\n", "line 1: SyntaxError"),
    "import": ("\nimport nothing_of_this_name\n", "line 2: ModuleNotFoundError"),
    "config": ("def config():\n    return 1 / 0\n", "line 2: ZeroDivisionError"),
    "other": ("def config():\n    return 1\n", "config() returned int, not a RunConfig"),
    "none": ("x = 1\n", "defines no function config()"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_experiment_file_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content, message = BROKEN[name]
    path = tmp_path / f"broken_{name}.py"
    path.write_text(content)
    assert main(["train", path.name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"lit-lazy: {path}: ")
    assert message in error
    assert error.count("\n") == 1


def test_runs_folders_of_one_process_are_kept_apart(tmp_path: Path, empty_store: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(empty_store, tmp_path / name / "mlflow.db")
        assert main(["train", "backcopy_tiny", "--runs", str(tmp_path / name), "--threads", "1"]) == 0
        assert experiment_names(default_uri(tmp_path / name))[:1] == ["train-backcopy_tiny"]


def test_none_is_understood_as_the_help_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["ablate", "run", "table2", "--base", "backcopy_tiny", "--dry-run", "--rows", "softmax", "--seeds", "0"]
    assert main([*command, "--model.n_kv_heads=None"]) == 0
    assert "1 cells of table2-backcopy_tiny:" in capsys.readouterr().out


def test_train_prints_metrics_and_a_second_time_returns_them(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "backcopy_tiny", "--runs", str(runs), "--threads", "1", "--model.attention.bias=Alibi"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "loss/excess" in first
    assert main(command) == 0
    again = capsys.readouterr().out
    assert again.splitlines() == [line for line in first.splitlines() if line in again.splitlines()]
    assert len(list((runs / "train-backcopy_tiny").iterdir())) == 1
