"""The ablation of a trained model's attention, on a tiny model of the same form."""

from pathlib import Path

import pytest

from lit_lazy.api import results, train
from lit_lazy.command.main import main
from lit_lazy.grid.ablation import Ablation, load_defined
from lit_lazy.support.named_files import find


@pytest.mark.long
def test_rows_start_from_the_trained_model_and_only_some_change_it_at_once(runs: Path) -> None:
    trained = train("smollm2_tiny", runs=runs, threads=1)
    few = ["--seeds", "0", "--workers", "2", "--brief", "--evaluations=[]", "--init-from", str(trained.checkpoint)]
    assert main(["ablate", "run", "adapt", "--base", "smollm2_tiny", *few, "--runs", str(runs)]) == 0
    (folder,) = runs.glob("adapt-smollm2_tiny-*")
    cells = results(folder.name, runs).cells.set_index("variant")
    assert len(cells) == len(load_defined(find("ablations", "adapt"), "ablation", Ablation).rows)
    before, loss = cells["init/loss/val"], trained.metrics["loss/val"]
    for name in ("softmax", "elastic ramped", "lazy", "elastic distilled", "gate"):
        assert before[name] == pytest.approx(loss, abs=1e-6), name
    assert before["elastic at once"] > loss + 1e-4
    assert cells["tau/mean"]["lazy"] > 0.8
