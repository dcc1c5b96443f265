"""An ablation with standard benchmarks: its table has the same values as `lit-lazy lm-eval`."""

import json

import pytest

from lit_lazy.command.main import main
from lit_lazy.table.stored import read_table

SOURCE = """
from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.benchmarks import BENCHMARK_COLUMNS
from lit_lazy.measure.lm_eval import LmEval
from lit_lazy.table.columns import COLUMNS

ablation = Ablation(
    name="judged",
    baseline="softmax",
    seeds=(0,),
    columns=(*COLUMNS, *BENCHMARK_COLUMNS),
    base="stdlib_tiny",
    common={{"evaluations": (LmEval(("boolq", "wikitext"), task_folder={folder!r}),)}},
    rows=(
        Row("softmax", {{"model.attention.normaliser": Softmax()}}, "ours"),
        Row("elastic", {{"model.attention.normaliser": Elastic()}}, "ours"),
    ),
)
"""


@pytest.mark.long
@pytest.mark.usefixtures("offline")
def test_a_table_holds_what_lm_eval_says(runs, task_folder, tmp_path, capsys) -> None:
    (tmp_path / "judged.py").write_text(SOURCE.format(folder=str(task_folder)))
    options = ["--runs", str(runs), "--workers", "1", "--keep-checkpoint"]
    assert main(["ablate", "run", str(tmp_path / "judged.py"), "--verbose", *options]) == 0
    assert "Wiki ppl ↓" in capsys.readouterr().out
    table = read_table(runs / "judged-stdlib_tiny" / "table.json")
    keys = [column.key for column in table.columns if column.key.startswith("lm-eval/")]
    assert keys == ["lm-eval/wikitext/word_perplexity", "lm-eval/boolq/acc"]
    for path in sorted((runs / "judged-stdlib_tiny" / "cells").glob("*/result.json")):
        out = tmp_path / "scores.json"
        tasks = ["--tasks", "boolq,wikitext", "--task-folder", str(task_folder)]
        assert main(["lm-eval", str(path.with_name("final.ckpt")), *tasks, "--out", str(out)]) == 0
        scores = json.loads(out.read_text())["tasks"]
        known = {
            f"lm-eval/{task}/{metric}": value
            for task, found in scores.items()
            for metric, value in found["metrics"].items()
        }
        result = json.loads(path.read_text())
        assert {name: x for name, x in result["metrics"].items() if name.startswith("lm-eval/")} == known
        normaliser = result["config"]["model"]["attention"]["normaliser"]["class"].lower()
        (row,) = (row for row in table.rows if row.variant == normaliser)
        for key in keys:
            assert row.metrics[key].mean == known[key]
