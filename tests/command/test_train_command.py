"""What `lit-lazy train` says in the end, and meanwhile to whoever gives the command twice."""

import os
import sys
from pathlib import Path

import forked
import pytest
from mlflow.tracking import MlflowClient

from lit_lazy.command.main import main
from lit_lazy.config import experiment, replace_at
from lit_lazy.config.key import cell_key
from lit_lazy.training.run import lock_of
from lit_lazy.training.watch import Watch

STEPS = ["--train.steps=8", "--train.checkpoint_every=3"]
CFG = replace_at(experiment("backcopy_tiny"), {"train.steps": 8, "train.checkpoint_every": 3})


def command(runs: Path, *more: str) -> list[str]:
    return ["train", "backcopy_tiny", "--runs", str(runs), "--threads", "1", *STEPS, *more]


def folder_of(runs: Path) -> Path:
    return runs / "train-backcopy_tiny" / cell_key(CFG, CFG.data.load().fingerprint)


def test_it_ends_in_a_summary_and_where_all_is(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted at step 4, resumed from the checkpoint at 3, asked for once more."""
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "on_train_batch_end", interrupt_at_four)
        assert main(command(runs)) == 130
    capsys.readouterr()
    assert main(command(runs, "--keep-checkpoint", "--logger", "csv")) == 0
    out = capsys.readouterr().out
    folder = folder_of(runs)
    lines = out.splitlines()
    assert lines[0] == "train-backcopy_tiny: 8 steps, resumed at step 3"
    assert lines[2].startswith("excess loss (nats) ↓  ")
    assert ", untrained " in lines[2]
    assert lines[-3:] == [
        f"run:        {folder}",
        f"checkpoint: {folder / 'final.ckpt'}",
        f"dashboard:  lit-lazy dashboard train-backcopy_tiny --runs {runs}",
    ]
    assert len(lines) < 12
    assert {"loss/val", "train/loss"} <= set((folder / "csv" / "metrics.csv").read_text().splitlines()[0].split(","))
    assert main(command(runs, "--verbose")) == 0
    said = capsys.readouterr().out
    assert said.startswith("train-backcopy_tiny: all 8 steps were trained before; nothing was done\n")
    assert len(said.splitlines()) > 30
    assert "\nloss/excess " in said


def interrupt_at_four(_self: Watch, trainer, *_: object) -> None:
    if trainer.global_step == 4:
        raise KeyboardInterrupt


def test_the_second_of_two_equal_commands_says_that_it_waits(runs: Path) -> None:
    """And then trains, since the first has ended without a result. MLflow never shows the run as failed."""
    folder = folder_of(runs)
    folder.mkdir(parents=True)
    with lock_of(folder):
        words = [sys.executable, "-m", "lit_lazy.command", *command(runs)]
        second = forked.Popen(words, stdout=forked.PIPE, stderr=forked.PIPE, text=True, env=dict(os.environ))
        assert second.stderr is not None
        said = second.stderr.readline()
        waited = f"another process trains this run, in {folder}; waiting for it (Ctrl-C ends the wait)\n"
        assert said == waited
        client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
        assert client.get_experiment_by_name("train-backcopy_tiny") is None
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0
    assert out.startswith("train-backcopy_tiny: 8 steps, from the beginning\n")
    found = client.get_experiment_by_name("train-backcopy_tiny")
    assert found is not None
    assert [run.info.status for run in client.search_runs([found.experiment_id])] == ["FINISHED"]
