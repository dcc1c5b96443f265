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


def interrupt_at_four(_self: Watch, trainer, *_: object) -> None:
    if trainer.global_step == 4:
        raise KeyboardInterrupt


def test_it_ends_in_a_summary_and_where_all_is(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted at step 4, resumed from the checkpoint at 3; asked for once more while another process holds it."""
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "on_train_batch_end", interrupt_at_four)
        assert main(command(runs)) == 130
    capsys.readouterr()
    assert main(command(runs, "--keep-checkpoint", "--logger", "csv")) == 0
    lines = capsys.readouterr().out.splitlines()
    folder = folder_of(runs)
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
    with lock_of(folder):
        words = [sys.executable, "-m", "lit_lazy.command", *command(runs, "--verbose")]
        second = forked.Popen(words, stdout=forked.PIPE, stderr=forked.PIPE, text=True, env=dict(os.environ))
        assert second.stderr is not None
        said = second.stderr.readline()
        assert said == f"another process trains this run, in {folder}; waiting for it (Ctrl-C ends the wait)\n"
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0
    assert out.startswith("train-backcopy_tiny: all 8 steps were trained before; nothing was done\n")
    assert len(out.splitlines()) > 30
    assert "\nloss/excess " in out
    assert list(folder.parent.iterdir()) == [folder]
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    found = client.get_experiment_by_name("train-backcopy_tiny")
    assert found is not None
    assert [run.info.status for run in client.search_runs([found.experiment_id])] == ["FINISHED"]
