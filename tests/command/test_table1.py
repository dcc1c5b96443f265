"""Models without attention from the command line: Table 1, a diagnosis, and mistakes in one line."""

import json
import os
import shutil
import sys
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from mistakes import expect_refusal

from lit_lazy.attention import Mamba2
from lit_lazy.command.main import main
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import load_experiment
from lit_lazy.measure.arrays import Diagnostics
from lit_lazy.support.named_files import find
from lit_lazy.table.stored import read_table
from lit_lazy.training.result import FINAL_CHECKPOINT
from lit_lazy.training.run import run

CFG = replace_at(load_experiment(find("experiments", "backcopy_tiny")), {"model.mixer": Mamba2()})
RUN = ["ablate", "run", "table1", "--base", "backcopy_tiny"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "abcdef"
    torch.set_num_threads(1)
    run(CFG, folder, keep_checkpoint=True)
    return folder / FINAL_CHECKPOINT


@pytest.mark.parametrize("option", ["--heads", "--layers"])
def test_a_model_without_heads_has_none_to_choose(option, trained, place, capsys) -> None:
    shutil.copy(trained, place)
    said = expect_refusal(["diagnose", FINAL_CHECKPOINT, option, "0"], capsys)
    assert f"{option} 0: the model has no attention; leave the option out" in said


def test_the_rest_of_a_diagnosis_is_made(trained: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loss by position at further lengths, hidden states, figures of both, and the run in MLflow."""
    assert main(["diagnose", str(trained), "--runs", str(runs), "--lengths", "32", "--threads", "1"]) == 0
    folder = runs / "diagnose-abcdef"
    found = Diagnostics.load(folder / "diagnostics.npz")
    assert found.prefixes == ["", "init/", "L32/"]
    assert found.arrays["L32/loss/by_position"].shape == (32,)
    assert np.isfinite(found.arrays["hidden/effective_rank"]).all()
    assert not [name for name in found.arrays if "sink" in name or "maps" in name]
    assert json.loads((folder / "diagnostics.json").read_text())["maps"] == []
    assert {path.stem for path in folder.glob("*.png")} == {"rank_profile", "loss_by_length"}
    printed = capsys.readouterr().out
    assert "effective_rank" in printed
    assert "sink" not in printed
    assert main(["evaluate", str(trained), "--threads", "1"]) == 0
    assert "loss/val" in capsys.readouterr().out


@pytest.mark.long
def test_table1_end_to_end(runs: Path) -> None:
    """Every row trains; what has no attention has no share of it, and the parameters are within 2 %."""
    command = [str(Path(sys.executable).parent / "lit-lazy"), *RUN, "--seeds", "0", "--workers", "1"]
    done = forked.run([*command, "--runs", str(runs)], cwd=runs, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row.variant: row.metrics for row in read_table(runs / "table1-backcopy_tiny" / "table.json").rows}
    assert list(rows) == ["softmax", "lazy", "RetNet", "Mamba2", "Gated DeltaNet"]
    defined = {name: {key for key, metric in row.items() if metric.n} for name, row in rows.items()}
    assert "mass/trigger" in defined["softmax"] & defined["lazy"]
    for name in ("RetNet", "Mamba2", "Gated DeltaNet"):
        assert {key.partition("/")[0] for key in defined[name]} == {"loss", "accuracy", "collapse", "model"}
    sizes = [row["model/parameters"].mean for row in rows.values()]
    assert max(sizes) <= 1.02 * min(sizes)
    again = forked.run([*command, "--runs", str(runs)], cwd=runs, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert "5 cells, all finished: nothing to do" in again.stdout
