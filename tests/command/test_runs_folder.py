"""Commands on a folder of finished runs."""

import json
import shutil
from pathlib import Path

import pytest
from mistakes import expect_refusal
from two_rows import two_rows

from lit_lazy.command.main import main

DUO = "duo-backcopy_tiny"
RUN = ["ablate", "run", "--keep-checkpoint", "--brief", "--workers", "1"]
pytestmark = pytest.mark.xdist_group("runs folder")  # one process makes the folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A runs folder with an ablation that kept its models, and a training."""
    folder = tmp_path_factory.mktemp("finished")
    runs, ablation = folder / "runs", folder / "duo.py"
    runs.mkdir()
    shutil.copy(empty_store, runs / "mlflow.db")
    ablation.write_text(two_rows("duo"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        assert main([*RUN, str(ablation), "--runs", str(runs)]) == 0
        assert main(["train", "backcopy_tiny", "--runs", str(runs), "--threads", "1"]) == 0
    return runs


@pytest.fixture
def runs(finished: Path, place: Path) -> Path:
    """A copy of it, in the current folder."""
    return shutil.copytree(finished, place / "runs")


def test_tables_are_compared_with_the_settings_of_mlflow_and_of_packed_cells(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ablate", "pack", DUO]) == 0
    Path("kept").mkdir()
    for name in ("table.json", "cells.jsonl.xz"):
        shutil.copy(runs / DUO / name, "kept")
    assert main(["ablate", "compare", "duo", "kept", "--columns", "loss/excess", "--out", "new/found.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "A  runs/duo-backcopy_tiny: duo on backcopy_tiny, 4 of 4 cells" in lines
    assert sum(line.endswith("tie    paired, n = 2") for line in lines) == 2
    assert lines[-1] == "The rows have the same settings."
    found = json.loads(Path("new/found.json").read_text())
    assert (found["names"], list(found["columns"]), found["settings"]) == ([f"runs/{DUO}", "kept"], ["loss/excess"], [])
    Path("kept/cells.jsonl.xz").unlink()
    assert main(["ablate", "compare", "kept/table.json", DUO]) == 0
    assert "Settings of the rows are unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["duo", DUO],
            "'duo': names several tables; give a folder with a table.json, or a grid in 'runs': duo-again",
        ),
        (["duo-backcopy_tini", DUO], "'duo-backcopy_tini': no such table (did you mean duo-backcopy_tiny?)"),
        (["empty", DUO], "'empty': 'empty' holds no table.json"),
        (["wrong.json", DUO], "'wrong.json': is no table.json (KeyError"),
        (["HEAD:runs/nothing", DUO], "'HEAD:runs/nothing/table.json': git shows no such file"),
        (
            [DUO, DUO, "--columns", "loss/exces"],
            "--columns 'loss/exces': is not in both tables (did you mean",
        ),
    ],
)
def test_tables_that_cannot_be_compared(
    words: list[str], message: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    Path("wrong.json").write_text('{"rows": []}')
    shutil.copytree(runs / DUO, runs / "duo-again")
    assert message in expect_refusal(["ablate", "compare", *words], capsys)
