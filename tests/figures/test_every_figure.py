"""Figures of every ablation, from random numbers, are legible; each class has a colour of its own."""

from collections.abc import Iterator
from dataclasses import replace
from inspect import isfunction
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from first_stage import use_stand_in
from legible import assert_legible
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from test_drawn import of_parts

from lit_lazy import figures
from lit_lazy.attention import Mixer, Normaliser, Position
from lit_lazy.config.serialisation import find_leaf_classes, replace_at
from lit_lazy.config.user_files import experiment, load_attribute
from lit_lazy.figures.canvas import BETTER, FIRST, NEUTRAL, SECOND, WORSE
from lit_lazy.figures.palette import SPARE, Colours, choose_colours
from lit_lazy.grid.ablation import Ablation, make_row_infos, select_rows
from lit_lazy.grid.question import Question, load_ablation_or_question
from lit_lazy.grid.search.definition import define
from lit_lazy.report.page import draw_table_figures
from lit_lazy.report.search import SearchReport
from lit_lazy.support.named_files import find, list_available
from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.records import Observation, Table
from lit_lazy.table.search_points import Point
from lit_lazy.table.stored import read_table
from lit_lazy.table.verdicts import add_verdict

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ABLATIONS = [
    name
    for name in list_available("ablations")
    # Those that are functions are `rivals` at other rates.
    if load_attribute(find("ablations", name), "search") is None
    and not isfunction(load_attribute(find("ablations", name), "ablation"))
]
STEPS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
AMONG_THE_FIRST = ("rivals",)
"""Ablations whose figures `make test` draws: those with the most normalisers. `make test-all` draws all."""


def make_up(ablation: Ablation, question: Question | None) -> Table:
    """A table of the ablation with random numbers in [0, 1); one row has diverged, one has no sparsity."""
    rng = np.random.default_rng(0)
    observations = []
    for i, row in enumerate(ablation.all_rows):
        config = row.apply_to(replace_at(experiment(ablation.base), ablation.common))
        part = config.model.attention.normaliser if config.model.mixer.attends else config.model.mixer
        parts = {"normaliser": type(part).__name__, "position": type(config.model.position).__name__}
        for seed in ablation.seeds:
            metrics = {column.key: float(rng.random()) for column in ablation.columns}
            metrics |= {key: 0.01 + 0.001 * float(rng.random()) for key in metrics if key.startswith("loss/")}
            if i == 1:
                metrics |= {key: 7.5 for key in metrics if key.startswith("loss/")}
            if i == 2:
                metrics |= {key: None for key in metrics if "sparsity" in key}
            observations.append(Observation(row.name, seed, "complete", metrics, **parts))
    infos = make_row_infos(select_rows(ablation, [row.name for row in ablation.all_rows], ()), ablation.base)
    names = (ablation.name, ablation.base, ablation.baseline)
    spec = TableSpec(*names, infos, ablation.columns, ablation.all_contrasts, "make", primary=ablation.primary)
    return add_verdict(build_table(spec, observations), question and question.partial_declaration)


def draw_all(ablation: Ablation, question: Question | None) -> Iterator[Figure]:
    table = make_up(ablation, question)
    names = ("val/excess", "watch/first_key_weight", "watch/first_key_share", "watch/tau_layer_0")
    trained = {
        row.name: [
            {name: [(step, (i + seed) / (1 + step)) for step in STEPS] for name in names} for seed in ablation.seeds
        ]
        for i, row in enumerate(ablation.all_rows)
    }
    yield from draw_table_figures(table).values()
    for draw in (figures.loss_over_training, figures.parameter_over_training, figures.sink_over_training):
        figure = draw(table, trained)
        assert figure is not None
        yield figure


@pytest.mark.parametrize(
    "name", [name if name in AMONG_THE_FIRST else pytest.param(name, marks=pytest.mark.long) for name in ABLATIONS]
)
def test_every_figure_of_an_ablation_is_legible(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_stand_in(monkeypatch, tmp_path)
    drawn = list(draw_all(*load_ablation_or_question(find("ablations", name))))
    assert len(drawn) >= 5
    for figure in drawn:
        assert_legible(figure)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1, 2, pytest.param(60, marks=pytest.mark.long)])
def test_every_figure_of_any_number_of_rows_is_legible(count: int) -> None:
    ablation, _ = load_ablation_or_question(find("ablations", "rivals"))
    many = [replace(row, name=f"{row.name} {i}" if i else row.name) for i in range(4) for row in ablation.all_rows]
    for figure in draw_all(replace(ablation, rows=tuple(many[:count]), axes={}), None):
        assert_legible(figure)


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/table.json")), ids=lambda path: path.parent.name)
def test_every_figure_of_a_committed_table_is_legible(path: Path) -> None:
    for figure in draw_table_figures(read_table(path)).values():
        assert_legible(figure)


def test_every_figure_of_a_search_is_legible() -> None:
    asked = load_attribute(find("ablations", "lazy_search"), "search")
    definition = define(asked, replace_at(experiment("backcopy_tiny"), asked.common))
    rng = np.random.default_rng(0)
    points = []
    for i in range(20):
        params = {path: axis.low + (axis.high - axis.low) * rng.random() for path, axis in definition.axes.items()}
        points.append(Point(i, str(i), params, "complete", float(rng.random()), {}, ""))
    importances = {path: 1 / len(definition.axes) for path in definition.axes}
    drawn = SearchReport("lazy_search-backcopy", definition, points, importances, [], "").draw_figures()
    assert len(drawn) == 3
    for figure in drawn.values():
        assert_legible(figure)


def list_own_colours(*bases: type) -> list[str]:
    """The colours that the project's classes under these bases have."""
    found = [
        cls for base in bases for cls in find_leaf_classes(base).values() if cls.__module__.startswith("lit_lazy.")
    ]
    return [vars(cls).get("colour", f"{cls.__name__} has none") for cls in found if not getattr(cls, "attends", False)]


def test_each_normaliser_and_each_position_has_a_colour_of_its_own() -> None:
    rules, positions = list_own_colours(Normaliser, Mixer), list_own_colours(Position)
    for palette in (rules, positions):
        for a, b in combinations([*palette, *SPARE, NEUTRAL], 2):
            assert np.abs(np.subtract(to_rgb(a), to_rgb(b))).sum() > 0.2, (a, b)
    assert not {*rules} & {*positions}
    assert choose_colours(["Elastic", "Softmax"]) == {"Elastic": FIRST, "Softmax": SECOND}
    assert not {BETTER, WORSE} & {FIRST, SECOND}


def test_a_row_s_colour_says_its_normaliser_or_where_all_have_one_its_position() -> None:
    """Custom classes have colours that no figure of some rows changes; no class is grey."""
    rows = {"a": ("Softmax", "Rope"), "b": ("Elastic", "Rope"), "c": ("Elastic", "NoPosition")}
    custom = {"x": ("", ""), "m": ("MyRule", "Rope"), "n": ("MyOther", "Rope"), "o": ("MyRule", "Rope")}
    table, _ = of_parts(**rows, **custom)
    by_normaliser, by_position = Colours(table, "abcxmno"), Colours(table, "bc")
    expected = [SECOND, FIRST, FIRST, NEUTRAL, SPARE[0], SPARE[1], SPARE[0]]
    assert [by_normaliser[row] for row in "abcxmno"] == expected
    labels = [handle.get_label() for handle in by_normaliser.make_legend_handles()]
    assert labels == ["Softmax", "Elastic", "MyRule", "MyOther"]
    assert Colours(table, "bn")["n"] == SPARE[1]
    assert [by_position[row] for row in "bc"] == [*choose_colours(["Rope", "NoPosition"]).values()]
    assert by_position["a"] == NEUTRAL, "is not in the figure"
    assert Colours(table, "x").make_legend_handles() == []
