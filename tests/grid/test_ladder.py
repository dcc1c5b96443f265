"""The ladder of compute-optimal models: its sizes and tokens, and all that a cell measures, in a tiny form."""

import math
from pathlib import Path

import pytest
from first_stage import use_stand_in

from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import experiment, load_module
from lit_lazy.data.packages import Packages
from lit_lazy.grid.question import load_ablation_or_question
from lit_lazy.measure.evaluation import Varied
from lit_lazy.support.named_files import find
from lit_lazy.table.columns import COLUMNS, HEAD_COLUMNS, SINK_COLUMNS
from lit_lazy.training.run import run

LADDER, RATES = (load_module(find("ablations", name)) for name in ("frontier", "frontier_rates"))
SIZES = {"100k": 1e5, "300k": 3e5, "1m": 1e6, "3m": 3e6, "10m": 1e7, "30m": 3e7}


@pytest.mark.parametrize(("size", "parameters"), SIZES.items())
def test_a_size_has_its_parameters_and_twenty_tokens_for_each(size: str, parameters: float) -> None:
    config = experiment(f"frontier_{size}")
    counted = LADDER.count_parameters(size)
    assert counted == pytest.approx(parameters, rel=0.15)
    tokens = config.train.steps * config.train.batch_size * config.data.context_length
    assert tokens == pytest.approx(LADDER.TOKENS_PER_PARAMETER * counted, rel=0.01)
    assert config.data.context_length == (256 if size in LADDER.SIZES else 512)


def test_ratios_change_the_steps_and_rules_the_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch, tmp_path)
    ladder, _ = load_ablation_or_question(find("ablations", "frontier"))
    trained = {row.name: row.apply_to(experiment("frontier_100k")).train for row in ladder.rows}
    usual = trained["lazy 300k"]
    for ratio in LADDER.RATIOS:
        other = trained[f"lazy 300k x{ratio}"]
        assert other.steps == usual.steps * ratio // 20
        assert (other.lr, other.batch_size) == (usual.lr, usual.batch_size)


def test_every_rule_trains_and_all_is_measured_in_a_tiny_form(tmp_path: Path) -> None:
    base, measure = experiment("frontier_tiny"), LADDER.measure_at(512)
    assert measure(replace_at(base, {"data": Packages()})) == (*measure(base), Varied("validated", ("packages",)))
    usual = (*COLUMNS, *HEAD_COLUMNS, *SINK_COLUMNS)  # some of them are of other data
    own = {column.key for column in LADDER.MEASURED if column not in usual} - {"validated_packages/loss/val"}
    asked = {"sink/rate", "sparsity/over_null"}
    for name, changes in RATES.RULES.items():
        whole = name == "lazy"
        cell = replace_at(base, changes | ({"evaluations": measure(base)} if whole else {}))
        result = run(cell, tmp_path / name)
        assert result.metrics["loss/val"] < math.log(256), name  # of no text
        assert not whole or own | asked <= result.metrics.keys()
