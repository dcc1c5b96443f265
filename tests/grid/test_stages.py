"""A second stage takes learning rates from the committed table of the first, or reports that it is missing."""

from pathlib import Path

import first_stage
import pytest

from lit_lazy.command.main import main
from lit_lazy.config import RunConfig
from lit_lazy.config.user_files import experiment, load_attribute
from lit_lazy.grid import stages
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import load_ablation_or_question
from lit_lazy.grid.stages import FirstStageMissing, at_best_rate, at_rate, find_best_rates
from lit_lazy.support.named_files import find, list_available

SECOND = [name for name in list_available("ablations") if callable(load_attribute(find("ablations", name), "question"))]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stages, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_each_row_gets_the_rate_of_its_lowest_mean_loss(results: Path) -> None:
    first_stage.write_table(results)
    assert find_best_rates(first_stage.NAME) == first_stage.BEST


def test_a_rate_at_which_a_seed_failed_is_not_chosen(results: Path) -> None:
    first_stage.write_table(results, failed={at_rate("elastic", 0.01): 11})
    assert find_best_rates(first_stage.NAME) == first_stage.BEST | {"elastic": 0.005}


def test_a_row_that_failed_at_every_rate_is_named(results: Path) -> None:
    first_stage.write_table(results, failed={at_rate("lazy", rate): 10 for rate in first_stage.RATES})
    with pytest.raises(ValueError, match=r"q_text_rates-stdlib_small/table\.json: 'lazy' is finished at no rate"):
        find_best_rates(first_stage.NAME)


def test_a_row_that_the_first_stage_has_not_is_named(results: Path) -> None:
    first_stage.write_table(results)
    with pytest.raises(ValueError, match="has no 'sigmoid'; it has softmax, softmax"):
        at_best_rate(Row("a", {}, "ours"), "sigmoid", first_stage.NAME)


def test_what_is_no_table_is_named(results: Path) -> None:
    first_stage.write_table(results).write_text("[]")
    with pytest.raises(ValueError, match=r"docs/results/q_text_rates-stdlib_small/table\.json: is no table\.json"):
        find_best_rates(first_stage.NAME)


def test_the_first_stage_has_the_rows_that_second_stages_ask_for(results: Path) -> None:
    ablation, _ = load_ablation_or_question(find("ablations", "q_text_rates"))
    first_stage.write_table(results)
    names = {at_rate(name, rate) for name in find_best_rates(first_stage.NAME) for rate in first_stage.RATES}
    assert {row.name for row in ablation.all_rows} == names
    assert f"{ablation.name}-{ablation.base}" == first_stage.NAME
    for row in ablation.all_rows:
        assert row.name == at_rate(row.name.rpartition(" at ")[0], row.changes["train.lr"])


@pytest.mark.parametrize("name", SECOND)
def test_a_second_stage_takes_the_rates_over_and_says_so(
    name: str, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_stage.write_all(results)
    ablation, asked = load_ablation_or_question(find("ablations", name))
    assert asked is not None
    for stage in first_stage.STAGES:
        first, _ = load_ablation_or_question(find("ablations", stage.partition("-")[0]))
        assert not {*ablation.seeds} & {*first.seeds}, "the rates were chosen by these seeds"
    before = {row.name: rate_of(row) for row in ablation.all_rows}
    for row in ablation.all_rows:
        assert before[row.name] in {rate for _, best in first_stage.STAGES.values() for rate in best.values()}
        assert f"learning rate {before[row.name]:g}" in row.note
    first_stage.write_all(results / "other", fail_best=True)
    monkeypatch.setattr(stages, "RESULTS", results / "other")
    again, _ = load_ablation_or_question(find("ablations", name))
    assert all(rate_of(row) != before[row.name] for row in again.all_rows)


def rate_of(row: Row) -> float:
    """The learning rate of a row that changes it alone, or the whole recipe."""
    return row.changes["train"].lr if "train" in row.changes else row.changes["train.lr"]


@pytest.mark.parametrize("name", SECOND)
def test_without_the_table_it_waits_in_one_line(name: str, results: Path) -> None:
    stage = first_stage.FRONTIER[0] if "frontier" in name else first_stage.NAME
    first, _, base = stage.partition("-")
    with pytest.raises(FirstStageMissing) as error:
        load_ablation_or_question(find("ablations", name))
    assert str(error.value) == (
        f"{name}: needs docs/results/{stage}/table.json; run `lit-lazy ablate run {first} --base {base}` and "
        "commit its table there"
    )
    assert not results.exists()


def test_commands_go_on_without_what_waits(
    results: Path,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lit_lazy.command import ablate_questions

    assert main(["ablate", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in SECOND)
    monkeypatch.setattr(ablate_questions, "make_grid", lambda *_: None)
    monkeypatch.setattr(ablate_questions, "_estimate_seconds", lambda _: 60.0)
    assert main(["ablate", "questions", "--dry-run", "--runs", str(tmp_path / "runs"), "--workers", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    waiting = [line for line in printed if line.startswith("not ready: ")]
    named = [line.split()[2].rstrip(":") for line in waiting]  # also those whose model this clone lacks
    assert [name for name in named if not name.startswith("q_adapt")] == SECOND
    priced = [line.split()[0] for line in printed if " about " in line]
    assert "q_text_rates" in priced
    assert not {*priced} & {*SECOND}
    assert main(["ablate", "run", SECOND[0], "--runs", str(tmp_path / "runs")]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"lit-lazy: {SECOND[0]}: needs docs/results/")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(("name", "base"), [("rivals_backcopy", "backcopy"), ("rivals_text", "stdlib_small")])
def test_the_tuned_rivals_take_their_rates_from_the_same_experiment(name: str, base: str, results: Path) -> None:
    path, first = find("ablations", name), f"rivals_rates-{base}"
    with pytest.raises(FirstStageMissing) as error:
        load_ablation_or_question(path)
    assert str(error.value) == (
        f"{name}: needs docs/results/{first}/table.json; run `lit-lazy ablate run rivals_rates --base {base}` and "
        "commit its table there"
    )
    rates, _ = load_ablation_or_question(find("ablations", "rivals_rates"))
    rivals, _ = load_ablation_or_question(find("ablations", "rivals"))
    tried = sorted({row.changes["train.lr"] for row in rates.rows})
    best = {row.name: tried[i % len(tried)] for i, row in enumerate(rivals.rows)}
    first_stage.write_table(results, name=first, best=best, rates=tried)
    tuned, asked = load_ablation_or_question(path)
    assert asked is None
    assert (tuned.name, tuned.base, tuned.baseline) == (name, base, "softmax")
    assert not {*tuned.seeds} & {*rates.seeds}
    for row, plain in zip(tuned.rows, rivals.rows, strict=True):
        assert row.name == plain.name
        assert row.changes == {**plain.changes, "train.lr": best[row.name]}
        assert row.note.endswith(f"learning rate {best[row.name]:g}, the best of {row.name} in {first}")


def test_an_ablation_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    path = tmp_path / "second.py"
    path.write_text("def ablation():\n    return 'rows'\n")
    with pytest.raises(ValueError, match=r"second\.py: its `ablation` returns a str; return an Ablation"):
        load_ablation_or_question(path)


def test_a_question_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    path = tmp_path / "q_wrong.py"
    path.write_text("def question():\n    return 1 / 0\n")
    with pytest.raises(ValueError, match=r"q_wrong\.py: line 2: ZeroDivisionError: division by zero$"):
        load_ablation_or_question(path)


def test_a_size_of_the_ladder_joins_once_its_rates_are_committed(results: Path) -> None:
    path = find("ablations", "frontier")
    with pytest.raises(FirstStageMissing, match="frontier_rates --base frontier_100k"):
        load_ablation_or_question(path)
    sizes = []
    for name in first_stage.FRONTIER:
        first_stage.write_table(results, name=name, best=first_stage.FRONTIER_BEST, rates=first_stage.FRONTIER_RATES)
        ladder, _ = load_ablation_or_question(path)
        sizes.append(sorted({row.name.removesuffix(" x5").removesuffix(" x80").split()[-1] for row in ladder.rows}))
    assert sizes == [["100k"], ["100k", "300k"]]
    cells = apply_rows(ladder)
    for name in (name for name in SECOND if "frontier" in name):
        asked, _ = load_ablation_or_question(find("ablations", name))
        assert apply_rows(asked).items() <= cells.items(), "it takes the ladder's cells"


def apply_rows(ablation: Ablation) -> dict[str, RunConfig]:
    base = experiment(ablation.base)
    return {row.name: row.apply_to(base) for row in ablation.all_rows}
