"""What the command of a grid reads and imports; a grid whose rows start from a trained model."""

import subprocess
import sys
from pathlib import Path

import pytest
from asked_grid import ask_for_grid

from lit_lazy.api import results, train
from lit_lazy.command.main import main
from lit_lazy.grid.ablation import Ablation, load_defined
from lit_lazy.support.names_to_paths import find


@pytest.mark.long
def test_the_command_imports_little() -> None:
    """Only workers and `train` train, only a new table is drawn: Lightning takes as long to import as all else."""
    code = (
        "import sys, lit_lazy.command.ablate_run, lit_lazy.grid.run\n"
        "import lit_lazy.grid.runs_folder, lit_lazy.training.check_before_run\n"
        "print({'lightning', 'torchmetrics', 'transformers', 'matplotlib', 'scipy.stats'} & {*sys.modules})\n"
        "import lit_lazy.report.ablation_page, lit_lazy.command.runs_report_dashboard\n"
        "print({'lightning', 'torchmetrics', 'transformers'} & {*sys.modules})"
    )
    said = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout
    assert said.split("\n")[:2] == ["set()", "set()"]


def test_a_dry_run_tokenises_no_text_to_learn_what_is_finished(tmp_path, pair, monkeypatch, capsys) -> None:
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text")
    base, text = tmp_path / "mine.py", find("experiments", "stdlib_tiny").read_text()
    base.write_text(
        text.replace("data.stdlib import Stdlib", "data.text import Text").replace("Stdlib(", "Text('a.txt', ")
    )
    (tmp_path / "pair-mine").mkdir()
    plan = ask_for_grid(["ablate", "run", pair, "--runs", str(tmp_path)]).plan
    (tmp_path / "pair-mine" / "plan.json").write_text(plan.to_json())
    command = ["ablate", "run", pair, "--base", str(base), "--runs", str(tmp_path), "--workers", "1", "--dry-run"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.startswith("Which cells are finished is unknown until their text is tokenised;")
    assert "5 cells of pair-mine: about" in out
    assert not (tmp_path / "cache").exists()


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
