"""An ablation's cells, expanded and checked before anything is created."""

import gc
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
from asked_grid import ask_for_grid
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_length_limit, _validate_metric_name

from lit_lazy.attention import Alibi, Elastic, Fire, LearnedBias, NoBias, Softmax
from lit_lazy.command.ablate_run import parse_request
from lit_lazy.command.main import make_parser
from lit_lazy.config.key import settings_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.config.user_files import experiment, load_attribute
from lit_lazy.grid.ablation import Ablation, Cell, Row, describe_value, expand, load_defined, prepare_rows, select_rows
from lit_lazy.support.names_to_paths import find, list_available
from lit_lazy.table.columns import COLUMNS, is_metric_name
from lit_lazy.table.records import check_row_name, make_outcome_name

NORMALISER, BIAS = "model.attention.normaliser", "model.attention.bias"
ROWS = (Row("softmax", {NORMALISER: Softmax()}, "ours"), Row("elastic", {NORMALISER: Elastic()}, "ours"))


def ablation(**changes: object) -> Ablation:
    return Ablation(
        **{"name": "a", "baseline": "softmax", "seeds": (0, 1), "columns": COLUMNS, "rows": ROWS, **changes}
    )


def cells_of(made: Ablation, rows: tuple[str, ...] = (), seeds: tuple[int, ...] = ()) -> list[Cell]:
    return expand(prepare_rows(select_rows(made, rows, seeds), experiment("backcopy_tiny", made.common)))


SHIPPED = [
    name
    for name in list_available("ablations")
    if isinstance(load_attribute(find("ablations", name), "ablation"), Ablation)
    if name != "adapt"  # starts from a trained model, as in test_adapt.py
]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_ablation_expands(name: str) -> None:
    made = load_defined(find("ablations", name), "ablation", Ablation)
    cells = cells_of(made)
    assert len({cell.key for cell in cells}) == len(cells)
    assert {contrast_row for c in made.contrasts for contrast_row in c.weights} <= {row.name for row in made.all_rows}
    for cell in cells:
        assert from_dict(RunConfig, cell.config).seed == cell.seed


def test_table2_has_three_seeds_and_five_in_its_two_by_two() -> None:
    made = load_defined(find("ablations", "table2"), "ablation", Ablation)
    seeds = Counter(len(row.seeds or made.seeds) for row in made.all_rows)
    assert seeds == {3: 13, 5: 4}
    assert [len(row.seeds or made.seeds) for row in made.all_rows if row.name in ("softmax", "lazy")] == [5, 5]


def test_a_factorial_compares_with_its_first_row_and_has_its_effects_and_interactions() -> None:
    made = ablation(rows=(), baseline="", axes={BIAS: (NoBias(), Alibi()), "train.lr": (0.1, 0.2)})
    rows = ["bias=NoBias lr=0.1", "bias=NoBias lr=0.2", "bias=Alibi lr=0.1", "bias=Alibi lr=0.2"]
    assert ([row.name for row in made.all_rows], made.baseline) == (rows, rows[0])
    names = [contrast.name for contrast in made.all_contrasts]
    assert names == ["bias: Alibi - NoBias", "lr: 0.2 - 0.1", "bias x lr: (Alibi - NoBias) x (0.2 - 0.1)"]
    assert Ablation("curve", axes={"train.lr": (0.1, 0.2)}).all_contrasts == ()
    assert cells_of(made)[0].axes == {"bias": "NoBias", "lr": "0.1"}
    biases = Ablation("biases", axes={BIAS: (LearnedBias(), LearnedBias(length=4), Alibi(slopes=(0.5, 0.25)))})
    assert [row.name for row in biases.all_rows] == ["bias=LearnedBias", "bias=LearnedBias(length=4)", "bias=Alibi"]


LR = "train.lr"
MALFORMED = [
    ({"common": {"seed": 3}}, "common changes seed; give seeds=(3,) instead"),
    (
        {"rows": tuple(replace(row, changes={**row.changes, LR: 0.1}) for row in ROWS), "common": {LR: 0.3}},
        "common['train.lr'] is replaced in every row; leave it out of common",
    ),
    (
        {
            "rows": tuple(Row(x.name, {NORMALISER: Elastic()}, "ours") for x in ROWS),
            "common": {NORMALISER + ".tau_init": 5.0},
        },
        "common['model.attention.normaliser.tau_init'] is replaced in every row; leave it out of common",
    ),
    ({"rows": (*ROWS, Row("mine", {NORMALISER: Elastic}, "ours"))}, "is the class Elastic; make one of it, Elastic(.."),
    ({"rows": (*ROWS, Row("mine", {NORMALISER: lambda _: 1 / 0}, "ours"))}, "its function failed: ZeroDivisionError: "),
]


@pytest.mark.parametrize(("changes", "message"), MALFORMED, ids=[message for _, message in MALFORMED])
def test_a_malformed_ablation_is_refused(changes: dict[str, object], message: str) -> None:
    """Further ones: tests/command/test_bad_input.py."""
    with pytest.raises(ValueError, match=re.escape(message)):
        cells_of(ablation(**changes))


def test_a_common_setting_may_be_replaced_by_some_rows_and_used_by_others() -> None:
    rows = Row("slow", {LR: 0.1}, "ours"), Row("as usual", {}, "ours")
    ablation(rows=rows, baseline="slow", common={LR: 0.3})
    double = Row("double", {LR: lambda base: 2 * base.train.lr}, "ours")
    ablation(rows=(rows[0], double), baseline="slow", common={LR: 0.3})


@dataclass(frozen=True)
class Called(Elastic):
    def __call__(self, base: object) -> object:
        raise AssertionError(base)


def test_a_part_that_can_be_called_is_a_part() -> None:
    made = Row("called", {NORMALISER: Called()}, "ours").apply_to(experiment("backcopy_tiny"))
    assert made.model.attention.normaliser == Called()


def test_twenty_thousand_points_are_made_in_linear_time() -> None:
    """A quadratic time would be a hundredfold."""
    gc.freeze()  # else a collection looks through what all tests before have made
    seconds = []
    for steps in (10, 100):
        axes = {"train.lr": [0.001 * i for i in range(200)], "train.steps": range(steps)}
        started = time.process_time()
        made = ablation(rows=(), axes=axes, baseline="lr=0.0 steps=0")
        assert len(select_rows(made, [], [])) == 200 * steps
        seconds.append(time.process_time() - started)
    assert seconds[1] < 40 * seconds[0]


STEPS, RATE = "--train.steps=9", "--train.lr=1e-05"
WEIGHTS = "--train.trainable=['blocks.*']"


@pytest.mark.parametrize(
    ("overrides", "name", "title"),
    [
        ([], "tiny", "tiny"),
        ([STEPS], "tiny-steps=9", "tiny-steps=9"),
        ([RATE, STEPS], "tiny-steps=9-lr=1e-05", "tiny-steps=9-lr=1e-05"),
        ([STEPS, WEIGHTS], "tiny-steps=9-trainable=HASH", "tiny-steps=9-trainable=['blocks.*']"),
        (["--init_from=a b/c.ckpt"], "tiny-init_from=HASH", "tiny-init_from=a b/c.ckpt"),
        ([STEPS, f"--init_from={'x' * 99}"], "tiny-HASH", f"tiny-steps=9-init_from={'x' * 99}"),
    ],
    ids=len,
)
def test_a_grid_is_named_by_its_overrides(overrides: list[str], name: str, title: str, tmp_path: Path) -> None:
    words = ["ablate", "run", "table2", "--base", "backcopy_tiny", "--runs", str(tmp_path)]
    options = make_parser().parse_args(words)
    request = parse_request(options, overrides)
    assert re.fullmatch(re.escape(f"table2-backcopy_{name}").replace("HASH", "[0-9a-f]{6}"), request.grid)
    assert request.base.title == f"backcopy_{title}"
    assert parse_request(options, overrides[::-1]).grid == request.grid
    former = tmp_path / f"table2-backcopy_tiny-{settings_key(request.base.config)}"
    former.mkdir()
    if overrides:
        assert parse_request(options, overrides).grid == former.name, "a folder of a former version is found as it lies"
    (tmp_path / request.grid).mkdir(exist_ok=True)
    assert parse_request(options, overrides).grid == request.grid


def test_names_of_axes_leave_rounding_errors_out() -> None:
    """Where two values would then have one name, both keep all digits."""
    steps = [i * 1e-4 for i in range(1, 4)]
    axes = {"train.lr": steps, NORMALISER: (Elastic(tau_init=0.1 + 0.2), Elastic())}
    made = ablation(rows=(), baseline="", axes=axes)
    assert made.all_rows[4].name == "lr=0.0003 normaliser=Elastic(tau_init=0.3)"
    assert {cell.axes["lr"] for cell in cells_of(made)} == {"0.0001", "0.0002", "0.0003"}
    assert {cell.config["train"]["lr"] for cell in cells_of(made)} == set(steps), "settings and keys are exact"
    close = {"train.lr": (0.3, 0.1 + 0.2), NORMALISER: (Elastic(tau_init=0.3), Elastic(tau_init=0.1 + 0.2))}
    made = ablation(rows=(), baseline="", axes=close)
    for axis, form in (("lr", "{}"), ("normaliser", "Elastic(tau_init={})")):
        named = {row.name.split(f"{axis}=")[1].split(" normaliser")[0] for row in made.all_rows}
        assert named == {form.format(number) for number in ("0.3", "0.30000000000000004")}
    assert {cell.axes["lr"] for cell in cells_of(made)} == {"0.3", "0.30000000000000004"}
    names = {3 * 1e-4: "0.0003", sum([0.1] * 10): "1.0", 10**-3.5: "0.00031622776601683794", 1e-5: "1e-05"}
    names |= {float("inf"): "inf", 0.0: "0.0", 300: "300"}
    assert {value: describe_value(value) for value in names} == names
    assert describe_value(True) == "True"
    assert describe_value(ablation) == "ablation", "a name is the same in the next process"


def test_each_cell_has_the_axes_its_own_parts_have() -> None:
    rows = (
        Row("a", {BIAS: LearnedBias(4), "data.context_length": 16}, "ours"),
        Row("b", {BIAS: Fire(64), "data.context_length": 32}, "ours"),
    )
    first, second = cells_of(ablation(rows=rows, baseline="a"), seeds=(0,))
    assert first.axes.items() >= {"bias": "LearnedBias", "length": "4", "context_length": "16"}.items()
    assert second.axes.items() >= {"bias": "Fire", "length": "64", "context_length": "32", "width": "32"}.items()


def test_only_the_rows_that_are_named_are_run_and_one_of_them_may_be_the_baseline() -> None:
    words = ["ablate", "run", "table2", "--rows", "softmax,lazy T5", "--seeds", "0,1"]
    for more, baseline in (([], "lazy"), (["--baseline", "softmax"], "softmax")):
        grid = ask_for_grid([*words, *more])
        rows = {"softmax": (0, 1), "lazy T5": (0, 1)}
        assert ({row.variant: row.seeds for row in grid.plan.rows}, grid.plan.baseline) == (rows, baseline)
        assert {cell.variant for cell in grid.cells} == rows.keys()


PARTS = ("a", "..", ".", "", "..b", "é", "a b", "a:b", "a,b", "a%b", "a\n", "\ud800", "\x1b[1m", "c" * 250, "c" * 249)


def passes(check: Callable[..., object], *given: object) -> bool:
    try:
        check(*given)
    except (ValueError, MlflowException):
        return False
    return True


def is_taken(metric: str) -> bool:
    """Whether MLflow itself takes the name of a metric; unlike here, also one that ends a line."""
    short = passes(_validate_length_limit, "Metric name", MAX_ENTITY_KEY_LENGTH, metric)
    return short and passes(_validate_metric_name, metric) and "\n" not in metric


def test_names_are_taken_as_mlflow_takes_them() -> None:
    """Also the name of a row's outcome, whatever the row: a finished grid must not fail to publish."""
    names = [*PARTS, *map("/".join, product(PARTS, PARTS))]
    assert [name for name in names if is_metric_name(name) != is_taken(name)] == []
    rows = [name for name in names if passes(check_row_name, name)]
    assert len(rows) > 20
    assert [name for name in rows if not is_taken(make_outcome_name("loss/val", name))] == []


def test_no_axis_has_the_name_of_something_else_of_a_cell() -> None:
    """Such as its seed, which the training has beside that of its data."""
    made = ablation(baseline="", rows=(), axes={"data.seed": (3, 4), "model.d_ff": (8, 16)})
    assert made.all_rows[0].name == "data.seed=3 d_ff=8"
