"""A second stage takes the best learning rates of the first, or says that it lacks them; the ladder of model sizes."""

import json
import lzma
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import first_stage
import pytest
from first_stage import use_stand_in
from made_grid import MadeGrid

from lit_lazy.command import ablate_questions_search
from lit_lazy.command.main import main
from lit_lazy.config import RunConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import experiment, load_attribute, load_module
from lit_lazy.data.packages import Packages
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import load_ablation_or_question
from lit_lazy.grid.stages import FirstStageMissing, at_best_rate, at_rate, choose_best_rates, find_best_rates
from lit_lazy.measure.evaluation import Varied
from lit_lazy.support.names_to_paths import find, list_available
from lit_lazy.table.build import TableSpec, build_table, read_table
from lit_lazy.table.columns import COLUMNS, HEAD_COLUMNS, SINK_COLUMNS
from lit_lazy.table.records import Column, Observation, RowInfo
from lit_lazy.table.results_table import Table
from lit_lazy.training.run import run

ROOT = Path(__file__).parents[2]
SECOND = [name for name in list_available("ablations") if callable(load_attribute(find("ablations", name), "question"))]
LOSS = Column("loss", "loss", "lower")
RATES = (0.002, 0.005, 0.01)


def make_table(failed: str = "", seed: int = 10, status: Any = "failed") -> Table:
    """A search in which each row is best at `first_stage.BEST`. failed: a row with a failed seed, or one of status."""
    rows = {at_rate(name, rate): abs(rate - best) for name, best in first_stage.BEST.items() for rate in RATES}
    cells = [
        Observation(row, at, status if (row, at) == (failed, seed) else "complete", {"loss": 2.0 + loss + 0.01 * at})
        for row, loss in rows.items()
        for at in (10, 11)
    ]
    infos = [RowInfo(row, "ours", (10, 11), "b") for row in rows]
    return build_table(TableSpec("search", "b", infos[0].variant, infos, [LOSS], [], "make", primary=["loss"]), cells)


@pytest.mark.parametrize(
    "folder", ["rivals_rates-backcopy", "rivals_rates-stdlib_small", "frontier_rates-frontier_100k"]
)
def test_the_committed_rates_are_the_best_of_the_committed_table(folder: str) -> None:
    table = read_table(ROOT / "docs" / "results" / folder / "table.json")
    assert find_best_rates(folder) == choose_best_rates(table)


def test_the_rates_of_the_first_round_are_the_best_of_its_record() -> None:
    record = json.loads(lzma.decompress((ROOT / "docs" / "results" / "first-round.json.xz").read_bytes()))
    found: dict[str, list[tuple[float, float]]] = {}
    for row in record["questions"]["q_text_rates"]["rows"]:
        name, _, rate = row["variant"].rpartition(" at ")
        found.setdefault(name, []).append((sum(row["values"]["loss/bits_per_byte"].values()), float(rate)))
    assert find_best_rates(first_stage.NAME) == {name: min(tried)[1] for name, tried in found.items()}


def test_a_search_is_written_where_second_stages_read_it(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("search-b", "search-c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "table.json").write_text(json.dumps(make_table().to_json()))
    for name in ("search-b", "search-c"):
        assert main(["ablate", "rates", name]) == 0
        assert f"rates.json: {name}: softmax 0.005" in capsys.readouterr().out
    row = at_best_rate(Row("mine", {"train.steps": 3}, "ours", note="a note"), "elastic", "search-b")
    assert row.changes == {"train.steps": 3, "train.lr": 0.01}
    assert row.note == "a note; learning rate 0.01, the best of elastic in search-b"
    assert find_best_rates("search-c") == first_stage.BEST
    assert choose_best_rates(make_table(at_rate("elastic", 0.01), 11))["elastic"] == 0.005, "a seed of its best failed"
    for status in ("waiting", "running"):  # as --limit leaves them: its mean may become the best
        with pytest.raises(
            ValueError, match=r"^search: rows=\['elastic at 0\.01'\]: have seeds without a result, so .*"
        ):
            choose_best_rates(make_table(at_rate("elastic", 0.01), 11, status))
    assert find_best_rates("rivals_rates-backcopy"), "the project's are known, too"
    with pytest.raises(ValueError, match="search-b: row 'sigmoid': is unknown; known are elastic, lazy, softmax"):
        at_best_rate(row, "sigmoid", "search-b")
    (tmp_path / "ablations" / "rates.json").write_text("[")
    with pytest.raises(ValueError, match=r"rates\.json: is no table of rates \(Expecting value"):
        find_best_rates("search-b")


def build(values: Mapping[str, Mapping[int, float | None]]) -> Table:
    """A search with these outcomes by row and seed; None for an undefined one."""
    infos = [RowInfo(row, "ours", tuple(seeds), "b") for row, seeds in values.items()]
    cells = [
        Observation(row, seed, "complete", {} if loss is None else {"loss": loss})
        for row, seeds in values.items()
        for seed, loss in seeds.items()
    ]
    return build_table(TableSpec("search", "b", infos[0].variant, infos, [LOSS], [], "make", primary=["loss"]), cells)


def test_rates_are_compared_on_the_same_seeds() -> None:
    """More seeds of one rate make its mean another; a rate that is undefined in a seed has none."""
    more = {"a at 0.001": {0: 1.0, 1: 1.0}, "a at 0.003": {0: 0.9, 1: 0.9, 2: 2.0}}
    with pytest.raises(
        ValueError, match=r"^search: row='a at 0\.003': has other seeds than 'a' at another rate; train"
    ):
        choose_best_rates(build(more))
    assert choose_best_rates(build(more | {"a at 0.003": {0: 0.9, 1: None}})) == {"a": 0.001}
    for rate in ("home", "nan", "-1", "inf"):
        with pytest.raises(ValueError, match=rf"row='a at {rate}': names no rate, such as"):
            choose_best_rates(build({f"a at {rate}": {0: 1.0}}))


def test_rates_are_those_of_the_cells_and_an_edge_is_said(tmp_path, monkeypatch, capsys) -> None:
    """A command that was interrupted has not written its table yet."""
    monkeypatch.chdir(tmp_path)
    made = MadeGrid(tmp_path, rows=("a at 0.001", "a at 0.003", "a at 0.01"))
    made.change_plan(columns=(LOSS,), primary=("loss",))
    for row, loss in zip(made.plan.rows, (3.0, 2.0, 1.0), strict=True):
        for seed in (0, 1):
            made.finish(row.variant, seed, {"loss": loss})
    (made.folder / "table.json").write_text(json.dumps(build({"a at 0.003": {0: 1.0}}).to_json()))
    assert main(["ablate", "rates", str(made.folder)]) == 0
    assert "made: a 0.01 (the highest of 3: a better one may lie beyond)\n" in capsys.readouterr().out


def test_a_table_without_a_best_rate_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "rates", str(tmp_path)]) == 2
    assert "table.json': is no table.json (FileNotFoundError" in capsys.readouterr().err
    assert main(["ablate", "rates", str(ROOT / "docs" / "results" / "q_text_2-stdlib_small")]) == 2
    assert "q_text_2: row='softmax': names no rate, such as softmax at 0.01" in capsys.readouterr().err
    info = RowInfo(at_rate("lazy", 0.1), "ours", (1,), "b")
    spec = TableSpec("search", "b", info.variant, [info], [LOSS], [], "make it", primary=["loss"])
    with pytest.raises(ValueError, match="search: 'lazy' is finished at no rate; finish `make it`"):
        choose_best_rates(build_table(spec, []))


@pytest.mark.parametrize("name", SECOND)
def test_a_second_stage_takes_the_rates_over_and_says_so_or_that_it_lacks_them(name, tmp_path, monkeypatch) -> None:
    use_stand_in(monkeypatch, tmp_path)
    ablation, asked = load_ablation_or_question(find("ablations", name))
    assert asked is not None
    before = {row.name: rate_of(row) for row in ablation.all_rows}
    rates = {rate for best in first_stage.STAGES.values() for rate in best.values()}
    for row in ablation.all_rows:
        faster = 2 if ", 2 times: " in row.note else 1
        assert before[row.name] / faster in rates
        assert f"learning rate {before[row.name]:g}" in row.note
    doubled = {name: {row: 2 * rate for row, rate in best.items()} for name, best in first_stage.STAGES.items()}
    use_stand_in(monkeypatch, tmp_path, doubled)
    again, _ = load_ablation_or_question(find("ablations", name))
    assert [rate_of(row) for row in again.all_rows] == [2 * rate for rate in before.values()]
    use_stand_in(monkeypatch, tmp_path, {})
    with pytest.raises(FirstStageMissing) as error:
        load_ablation_or_question(find("ablations", name))
    stage = next(stage for stage in first_stage.STAGES if stage in str(error.value))
    first, _, base = stage.partition("-")
    assert str(error.value) == (
        f"{name}: needs the rates of {stage}; `lit-lazy ablate run {first} --base {base}`, then `lit-lazy ablate rates "
        f"runs/{stage}`"
    )


def rate_of(row: Row) -> float:
    """The learning rate of a row that changes it alone, or the whole recipe."""
    return row.changes["train"].lr if "train" in row.changes else row.changes["train.lr"]


def test_commands_go_on_without_what_waits(monkeypatch, tmp_path, capsys) -> None:
    use_stand_in(monkeypatch, tmp_path, {})
    monkeypatch.chdir(tmp_path)  # where no model lies
    assert main(["ablate", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in (*SECOND, "table2_grid", "stdlib_tiny", "lazy_search"))
    monkeypatch.setattr(ablate_questions_search, "make_grid", lambda *_: None)
    monkeypatch.setattr(ablate_questions_search, "_estimate_seconds", lambda _: 60.0)
    assert main(["ablate", "questions", "--dry-run", "--runs", str(tmp_path / "runs"), "--workers", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    waiting = [line for line in printed if line.startswith("not ready: ")]
    named = [line.split()[2].rstrip(":") for line in waiting]
    assert [name for name in named if not name.startswith("q_adapt")] == SECOND
    reason = "needs the model models/smollm2.ckpt, from which smollm2 starts; `make smollm2` makes it"
    assert f"not ready: q_adapt_loss: {reason}" in printed
    priced = [line.split()[0] for line in printed if " about " in line]
    assert "q_mask_2" in priced
    assert not {*priced} & {*SECOND}


def test_a_size_of_the_ladder_joins_once_its_rates_are_committed(tmp_path, monkeypatch) -> None:
    path, sizes = find("ablations", "frontier"), []
    for count in (1, 2):
        use_stand_in(monkeypatch, tmp_path, dict.fromkeys(first_stage.FRONTIER[:count], first_stage.FRONTIER_BEST))
        ladder, _ = load_ablation_or_question(path)
        sizes.append(sorted({row.name.removesuffix(" x5").removesuffix(" x80").split()[-1] for row in ladder.rows}))
    assert sizes == [["100k"], ["100k", "300k"]]
    cells = apply_rows(ladder)
    for name in (name for name in SECOND if "frontier" in name):
        asked, _ = load_ablation_or_question(find("ablations", name))
        own = {name: config for name, config in apply_rows(asked).items() if " at " not in name}
        assert own.items() <= cells.items(), "it takes the ladder's cells"


def apply_rows(ablation: Ablation) -> dict[str, RunConfig]:
    base = experiment(ablation.base)
    return {row.name: row.apply_to(base) for row in ablation.all_rows}


LADDER, LADDER_RATES = (load_module(find("ablations", name)) for name in ("frontier", "frontier_rates"))
SIZES = {"100k": 1e5, "300k": 3e5, "1m": 1e6, "3m": 3e6, "10m": 1e7, "30m": 3e7}


@pytest.mark.parametrize(("size", "parameters"), SIZES.items())
def test_a_size_has_its_parameters_and_twenty_tokens_for_each(size: str, parameters: float) -> None:
    config = experiment(f"frontier_{size}")
    counted = LADDER.count_parameters(size)
    assert counted == pytest.approx(parameters, rel=0.15)
    tokens = config.train.steps * config.train.batch_size * config.data.context_length
    assert tokens == pytest.approx(LADDER.TOKENS_PER_PARAMETER * counted, rel=0.01)
    assert config.data.context_length == (256 if size in LADDER.SIZES else 512)


def test_every_rule_trains_and_all_is_measured_in_a_tiny_form(tmp_path: Path) -> None:
    base, measure = experiment("frontier_tiny"), LADDER.measure_at(512)
    assert measure(replace_at(base, {"data": Packages()})) == (*measure(base), Varied("validated", ("packages",)))
    usual = (*COLUMNS, *HEAD_COLUMNS, *SINK_COLUMNS)  # some of them are of other data
    own = {column.key for column in LADDER.MEASURED if column not in usual} - {"validated_packages/loss/val"}
    asked = {"sink/rate", "sparsity/over_null"}
    for name, changes in LADDER_RATES.RULES.items():
        whole = name == "lazy"
        cell = replace_at(base, changes | ({"evaluations": measure(base)} if whole else {}))
        result = run(cell, tmp_path / name)
        assert result.metrics["loss/val"] < math.log(256), name  # of no text
        assert not whole or own | asked <= result.metrics.keys()


def test_the_best_rate_is_the_best_of_its_column_and_exact() -> None:
    def choose(better: Any) -> dict[str, float]:
        return choose_best_rates(replace(make_table(), columns=(replace(LOSS, better=better),)))

    assert choose("lower") == first_stage.BEST
    table = make_table()
    before = [replace(row, variant=f"{row.variant} (version 1a2b3c)") for row in table.rows]
    assert choose_best_rates(replace(table, rows=(*table.rows, *before))) == first_stage.BEST
    own = replace(table.rows[0], variant="x (version 2) at 0.01", cells={"missing": [0]})
    with pytest.raises(ValueError, match=r"'x \(version 2\)' is finished at no rate"):
        choose_best_rates(replace(table, rows=(*table.rows, own)))
    assert not choose("higher").items() & first_stage.BEST.items()
    with pytest.raises(ValueError, match="primary='loss': has no direction; give its column better="):
        choose(None)
    rate = 0.0012345678
    assert float(at_rate("softmax", rate).removeprefix("softmax at ")) == rate
