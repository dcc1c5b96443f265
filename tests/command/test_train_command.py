"""`lit-lazy train`: its summary, what it says to whoever gives it twice, and runs on several devices."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import forked
import pytest
import torch
from mistakes import snapshot_tree
from mlflow.tracking import MlflowClient
from stores import make_runs

from lit_lazy import api
from lit_lazy.attention import Elastic, LearnedBias
from lit_lazy.command.doctor_new_fields import fill_template
from lit_lazy.command.main import main
from lit_lazy.config import experiment, replace_at
from lit_lazy.config.key import cell_key
from lit_lazy.tracking.store_address import TrackingError
from lit_lazy.tracking.tracked_training import format_run_name
from lit_lazy.tracking.tracker import MirroredRun
from lit_lazy.training.head_monitor import HeadMonitor
from lit_lazy.training.run_folder import FINAL_CHECKPOINT, make_lock

STEPS = ["--train.steps=8", "--train.checkpoint_every=3"]
CFG = replace_at(experiment("backcopy_tiny"), {"train.steps": 8, "train.checkpoint_every": 3})


def command(runs: Path, *more: str) -> list[str]:
    return ["train", "backcopy_tiny", "--runs", str(runs), "--threads", "1", *STEPS, *more]


def folder_of(runs: Path) -> Path:
    return runs / "train-backcopy_tiny" / cell_key(CFG, CFG.data.load().fingerprint)


def interrupt_at_four(_self: HeadMonitor, trainer, *_: object) -> None:
    if trainer.global_step == 4:
        raise KeyboardInterrupt


def test_it_ends_in_a_summary_and_where_all_is(runs, capsys, monkeypatch) -> None:
    """Interrupted at step 4, resumed from the checkpoint at 3; asked for once more while another process holds it."""
    with monkeypatch.context() as patch:
        patch.setattr(HeadMonitor, "on_train_batch_end", interrupt_at_four)
        assert main(command(runs)) == 130
    capsys.readouterr()
    assert main(command(runs, "--keep-checkpoint", "--logger", "csv")) == 0
    lines = capsys.readouterr().out.splitlines()
    folder = folder_of(runs)
    assert lines[0] == "train-backcopy_tiny: 8 steps, resumed at step 3"
    assert re.match(r"validation loss \(nats\) ↓  .*, untrained ", lines[3])
    assert lines[-3:-1] == [f"run:        {folder}", f"checkpoint: {folder / 'final.ckpt'}"]
    assert {"loss/val", "train/loss"} <= {*(folder / "csv" / "metrics.csv").read_text().splitlines()[0].split(",")}
    with make_lock(folder):
        words = [sys.executable, "-m", "lit_lazy", *command(runs, "--verbose")]
        second = forked.Popen(words, stdout=forked.PIPE, stderr=forked.PIPE, text=True, env=dict(os.environ))
        assert second.stderr is not None
        said = second.stderr.readline()
        assert said == f"another process trains this run, in {folder}; waiting for it (Ctrl-C ends the wait)\n"
    out, _ = second.communicate(timeout=120)
    assert second.returncode == 0
    assert out.startswith("train-backcopy_tiny: all 8 steps were trained before\n")
    assert "\nloss/excess " in out
    assert list(folder.parent.glob("*/")) == [folder]


def test_mlflow_shows_how_it_ended_as_soon_as_it_answers(runs, capsys, monkeypatch) -> None:
    """Interrupted; finished while MLflow is away; asked for once more."""
    client = MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")

    def look() -> tuple[str, str, str]:
        (run,) = client.search_runs([client.get_experiment_by_name("train-backcopy_tiny").experiment_id])
        return run.info.status, run.data.tags["state"], run.data.tags.get("reason", "")

    with monkeypatch.context() as patch:
        patch.setattr(HeadMonitor, "on_train_batch_end", interrupt_at_four)
        assert main(command(runs)) == 130
    interrupted = look()
    assert interrupted == ("KILLED", "failed", "interrupted")
    with monkeypatch.context() as patch:
        patch.setattr(MirroredRun, "sync", Mock(side_effect=TrackingError("gone away")))
        assert main(command(runs)) == 1
    lacks = f"trained, but results are kept in {folder_of(runs)}, MLflow lacks them (gone away)"
    assert f"lit-lazy: {lacks}; the same command sends them\n" in capsys.readouterr().err
    assert look() == interrupted
    assert main(command(runs)) == 0
    assert look() == ("FINISHED", "complete", "")


def test_trainings_of_one_experiment_have_names_that_tell_them_apart() -> None:
    softmax = experiment("backcopy_tiny")
    lazy = replace_at(softmax, {"model.attention.normaliser": Elastic(), "model.attention.bias": LearnedBias()})
    names = [format_run_name("backcopy_tiny", cfg) for cfg in (softmax, replace_at(lazy, {"seed": 3}))]
    assert names == ["backcopy_tiny Softmax seed 0", "backcopy_tiny Elastic + LearnedBias seed 3"]


def test_a_single_training_keeps_its_model(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a finished run without it, which cannot have it any more, says what to remove."""
    folder, again = folder_of(runs), "; remove that folder to train it again"
    assert main(command(runs, "--no-keep-checkpoint")) == 0
    not_kept = f"the model of the run in {folder} was not kept{again}"
    assert f"checkpoint: {not_kept}\n" in capsys.readouterr().out
    before = snapshot_tree(runs)
    assert main(command(runs, "--keep-checkpoint")) == 2
    assert capsys.readouterr() == ("", f"lit-lazy: {not_kept}\n")
    assert snapshot_tree(runs) == before
    shutil.rmtree(folder)
    assert main(command(runs)) == 0
    assert f"checkpoint: {folder / FINAL_CHECKPOINT}\n" in capsys.readouterr().out
    assert main(command(runs, "--evaluations=Int8()")) == 0
    assert re.search(r"^int8/loss_rise +-?\d", capsys.readouterr().out, re.M)
    assert api.load(api.train(CFG, name="backcopy_tiny", runs=runs).checkpoint).config == CFG
    assert main(command(runs, "--keep-checkpoint")) == 0
    damaged = f"the model of the run in {folder} is damaged{again}"
    (folder / FINAL_CHECKPOINT).write_bytes((folder / FINAL_CHECKPOINT).read_bytes()[:5000])
    assert main(command(runs)) == 0
    assert f"checkpoint: {damaged}\n" in capsys.readouterr().out
    assert main(command(runs, "--keep-checkpoint")) == 2
    assert capsys.readouterr() == ("", f"lit-lazy: {damaged}\n")


@pytest.mark.long
@pytest.mark.parametrize("start", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_real_processes(start: list[str], tmp_path: Path) -> None:
    """Those that rank 0 starts, and those of torchrun."""
    command = [sys.executable, *start, "-m", "lit_lazy", "train", "backcopy_tiny"]
    command += [] if start else ["--devices", "2"]
    subprocess.run([*command, "--runs", str(tmp_path / "two")], check=True, timeout=200)
    assert main(["train", "backcopy_tiny", "--micro-batch", "4", "--runs", str(tmp_path / "one")]) == 0
    two, one = ([*(tmp_path / name).rglob("result.json")] for name in ("two", "one"))
    assert [path.parent.name for path in two] == [path.parent.name for path in one]
    on_two, on_one = (json.loads(path.read_text()) for path in (*two, *one))
    assert on_two["metrics"] == on_one["metrics"]
    assert on_two["execution"]["devices"] == 2
    client = MlflowClient(f"sqlite:///{tmp_path / 'two' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("train-backcopy_tiny").experiment_id])
    assert "devices 2" in run.data.tags["execution"]


def test_an_edited_rule_is_said(place: Path, empty_store: Path) -> None:
    """Also where the edit is in a file that the rule's own imports. This process does not import the rule."""
    make_runs(place, empty_store)
    helper = place / "helper.py"
    rule = fill_template("normaliser", "cooled").replace("backcopy_small", "backcopy_tiny")
    (place / "rule.py").write_text(f"from helper import SCALE\n{rule}")
    helper.write_text("SCALE = 1.0\n")
    forked.run_in_fork(lambda: main(["train", "./rule.py", "--threads", "1"]))
    checkpoint = next(place.glob("runs/*/*/final.ckpt"))

    def run(*words: str) -> str:
        given = [words[0], str(checkpoint), *words[1:], "--import", "rule.py", "--threads", "1"]
        return forked.check([sys.executable, "-m", "lit_lazy", *given]).stderr

    commands = ("evaluate",), ("generate", "--prompt", "1 2", "--tokens", "2")
    helper.write_text("SCALE = 1.0  # as before\n")
    assert not [command for command in commands if "MyCooled" in run(*command)]
    helper.write_text("SCALE = 9.0\n")
    changed = "a file that defines MyCooled has changed since its training; this is new code"
    assert all(changed in run(*command) for command in commands)
    content = torch.load(checkpoint)
    content["sources"]["code"]["MyCooled"] = "0123456789ab"
    torch.save(content, checkpoint)
    assert "an earlier version hashed the code of MyCooled, so it may have changed since" in run("evaluate")
