"""Figures of every ablation, from random numbers: they are legible and use consistent colours."""

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
from matplotlib.image import imread

from lit_lazy import figures
from lit_lazy.attention import Mixer, Normaliser, Position
from lit_lazy.config.serialisation import find_leaf_classes, replace_at
from lit_lazy.config.user_files import experiment, load_attribute
from lit_lazy.figures.ablation import Histories
from lit_lazy.figures.canvas import BETTER, FIRST, NEUTRAL, SECOND, WORSE
from lit_lazy.figures.mechanism import mechanism_figure
from lit_lazy.figures.palette import SPARE, Colours, choose_colours
from lit_lazy.grid.ablation import Ablation, make_row_infos, select_rows
from lit_lazy.grid.question import Question, load_ablation_or_question
from lit_lazy.grid.search.definition import define
from lit_lazy.report.page import draw_table_figures
from lit_lazy.report.search import SearchReport
from lit_lazy.support.named_files import find, list_available
from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.records import Column, Observation, Point, RowInfo, Table
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


def rows_of(ablation: Ablation) -> list[str]:
    return [row.name for row in ablation.all_rows]


def made_up(ablation: Ablation, question: Question | None) -> Table:
    """A table of the ablation with random numbers in [0, 1); one row has diverged, one has no sparsity."""
    rng = np.random.default_rng(0)
    observations = []
    for i, row in enumerate(ablation.all_rows):
        name, config = row.name, row.apply_to(replace_at(experiment(ablation.base), ablation.common))
        part = config.model.attention.normaliser if config.model.mixer.attends else config.model.mixer
        parts = {"normaliser": type(part).__name__, "position": type(config.model.position).__name__}
        for seed in ablation.seeds:
            metrics = {column.key: float(rng.random()) for column in ablation.columns}
            metrics |= {key: 0.01 + 0.001 * float(rng.random()) for key in metrics if key.startswith("loss/")}
            if i == 1:
                metrics |= {key: 7.5 for key in metrics if key.startswith("loss/")}
            if i == 2:
                metrics |= {key: None for key in metrics if "sparsity" in key}
            observations.append(Observation(name, seed, "complete", metrics, **parts))
    infos = make_row_infos(select_rows(ablation, rows_of(ablation), ()), ablation.base)
    names = (ablation.name, ablation.base, ablation.baseline)
    spec = TableSpec(*names, infos, ablation.columns, ablation.all_contrasts, "make", primary=ablation.primary)
    return add_verdict(build_table(spec, observations), question and question.partial_declaration)


def histories(ablation: Ablation) -> Histories:
    names = ("val/excess", "watch/first_key_weight", "watch/first_key_share", "watch/tau_layer_0")
    return {
        row: [{name: [(step, (i + seed) / (1 + step)) for step in STEPS] for name in names} for seed in ablation.seeds]
        for i, row in enumerate(rows_of(ablation))
    }


def figures_of(ablation: Ablation, question: Question | None) -> Iterator[Figure]:
    table, trained = made_up(ablation, question), histories(ablation)
    drawn = [
        *draw_table_figures(table).values(),
        figures.loss_over_training(table, trained),
        figures.parameter_over_training(table, trained),
        figures.sink_over_training(table, trained),
    ]
    yield from (figure for figure in drawn if figure is not None)


@pytest.mark.parametrize(
    "name", [name if name in AMONG_THE_FIRST else pytest.param(name, marks=pytest.mark.long) for name in ABLATIONS]
)
def test_every_figure_of_an_ablation_is_legible(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_stand_in(monkeypatch, tmp_path)
    ablation, question = load_ablation_or_question(find("ablations", name))
    drawn = list(figures_of(ablation, question))
    assert len(drawn) >= 2 + (question is not None)
    for figure in drawn:
        assert_legible(figure)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1, 2, pytest.param(60, marks=pytest.mark.long)])
def test_every_figure_of_any_number_of_rows_is_legible(count: int) -> None:
    ablation, _ = load_ablation_or_question(find("ablations", "rivals"))
    many = [replace(row, name=f"{row.name} {i}" if i else row.name) for i in range(4) for row in ablation.all_rows]
    for figure in figures_of(replace(ablation, rows=tuple(many[:count]), axes={}), None):
        assert_legible(figure)


@pytest.mark.long
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/table.json")), ids=lambda path: path.parent.name)
def test_every_figure_of_a_committed_table_is_legible(path: Path) -> None:
    table = read_table(path)
    for figure in draw_table_figures(table).values():
        assert_legible(figure)


def test_every_figure_of_a_search_is_legible() -> None:
    asked = load_attribute(find("ablations", "lazy_search"), "search")
    definition = define(asked, replace_at(experiment("backcopy_tiny"), asked.common))
    rng = np.random.default_rng(0)
    axes = definition.axes
    points = [
        Point(
            number=i,
            run=str(i),
            params={path: axis.low + (axis.high - axis.low) * rng.random() for path, axis in axes.items()},
            state="complete",
            value=float(rng.random()),
            reports={},
            reason="",
        )
        for i in range(20)
    ]
    importances = {path: 1 / len(definition.axes) for path in definition.axes}
    drawn = SearchReport("lazy_search-backcopy", definition, points, importances, [], "").draw_figures()
    assert len(drawn) == 3
    for figure in drawn.values():
        assert_legible(figure)


def own_colours(*bases: type) -> list[str]:
    """The colours that the project's classes under these bases have."""
    found = [
        cls for base in bases for cls in find_leaf_classes(base).values() if cls.__module__.startswith("lit_lazy.")
    ]
    return [vars(cls).get("colour", f"{cls.__name__} has none") for cls in found if not getattr(cls, "attends", False)]


def test_each_normaliser_and_each_position_has_a_colour_of_its_own() -> None:
    rules, positions = own_colours(Normaliser, Mixer), own_colours(Position)
    for palette in (rules, positions):
        for a, b in combinations([*palette, *SPARE, NEUTRAL], 2):
            assert np.abs(np.subtract(to_rgb(a), to_rgb(b))).sum() > 0.2, (a, b)
    assert not {*rules} & {*positions}
    assert choose_colours(["Elastic", "Softmax"]) == {"Elastic": FIRST, "Softmax": SECOND}
    assert not {BETTER, WORSE} & {FIRST, SECOND}


def of_parts(**parts: tuple[str, str]) -> Table:
    """A table whose rows have normalisers and positions of these classes."""
    seen = [
        Observation(name, 0, "complete", {"loss/val": 1.0}, normaliser=normaliser, position=position)
        for name, (normaliser, position) in parts.items()
    ]
    rows = [RowInfo(name, "ours", (0,), "tiny") for name in parts]
    spec = TableSpec("study", "tiny", next(iter(parts)), rows, (Column("loss/val", "loss"),), (), "make")
    return build_table(spec, seen)


def test_a_row_s_colour_says_its_normaliser_or_where_all_have_one_its_position() -> None:
    table = of_parts(a=("Softmax", "Rope"), b=("Elastic", "Rope"), c=("Elastic", "NoPosition"))
    by_normaliser = Colours(table, "abc")
    assert [by_normaliser[row] for row in "abc"] == [SECOND, FIRST, FIRST]
    assert [handle.get_label() for handle in by_normaliser.make_legend_handles()] == ["Softmax", "Elastic"]
    by_position = Colours(table, "bc")
    assert [by_position[row] for row in "bc"] == [*choose_colours(["Rope", "NoPosition"]).values()]
    assert by_position["a"] == NEUTRAL, "is not in the figure"
    unknown = Colours(of_parts(x=("", "")), "x")
    assert (unknown["x"], unknown.make_legend_handles()) == (NEUTRAL, [])


def test_custom_classes_have_colours_that_no_figure_of_some_rows_changes() -> None:
    table = of_parts(a=("MyRule", "Rope"), b=("Elastic", "Rope"), c=("MyOther", "Rope"), d=("MyRule", "Rope"))
    colours = Colours(table, "abcd")
    assert [colours[row] for row in "abcd"] == [SPARE[0], FIRST, SPARE[1], SPARE[0]]
    assert [handle.get_label() for handle in colours.make_legend_handles()] == ["MyRule", "Elastic", "MyOther"]
    assert Colours(table, "bc")["c"] == SPARE[1]


def test_rows_have_the_colours_of_their_normalisers_in_every_figure() -> None:
    ablation, question = load_ablation_or_question(find("ablations", "q_mask_2"))
    table, trained = made_up(ablation, question), histories(ablation)
    assert {row.normaliser for row in table.rows} == {"Softmax", "Elastic"}
    expected = {row.variant: choose_colours([row.normaliser])[row.normaliser] for row in table.rows}
    scatter = figures.loss_against_sparsity(table)
    shown = {line.get_color() for line in scatter.axes[0].lines if line.get_marker() in ("o", "D")}
    assert shown == set(expected.values())
    for figure in (
        figures.loss_over_training(table, trained),
        figures.parameter_over_training(table, trained),
        figures.sink_over_training(table, trained),
    ):
        for axes in (axes for axes in figure.axes if axes.axison):
            own = [line for line in axes.lines if not line.get_label().startswith("_")]
            assert {line.get_color() for line in own} == {expected[axes.get_title().replace("\n", " ")]}
            assert len({line.get_linestyle() for line in own}) == len(own), "told apart in grey too"


@pytest.mark.parametrize(
    ("metrics", "scale", "label"),
    [
        (("val/loss",), "linear", "validation loss"),
        (("val/loss", "val/excess"), "log", "validation loss above the optimum"),
    ],
)
def test_the_loss_over_training_is_above_the_optimum_where_the_data_know_it(
    metrics: tuple[str, ...], scale: str, label: str
) -> None:
    table = of_parts(a=("Softmax", "Rope"))
    seeds = [{name: [(8, 4.0), (16, last)] for name in metrics} for last in (1.0, 3.0)]
    figure = figures.loss_over_training(table, {"a": seeds})
    (line,) = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
    assert (line.get_label(), figure.axes[0].get_yscale()) == (label, scale)
    np.testing.assert_array_equal(line.get_xydata(), [(8, 4.0), (16, 2.0)])
    band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (1.0, 4.0), "the range of the seeds"
    assert figures.loss_over_training(table, {"a": [{}]}) is None


def test_a_figure_brings_its_own_page(tmp_path: Path) -> None:
    """The background is opaque white, so that a figure is readable on a dark page."""
    png, svg = figures.save_figure(mechanism_figure(), tmp_path / "x")
    pixels = imread(png)
    assert pixels.shape[-1] == 3 or (pixels[..., 3] == 1).all()
    assert (pixels[0, 0, :3] == 1).all()
    assert 'style="fill: #ffffff"' in svg.read_text()
