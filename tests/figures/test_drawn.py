"""Every figure draws these inputs as it did, its texts, limits, numbers and colours, and is legible.

`python tests/figures/test_drawn.py` writes `drawn.txt` anew; read its differences before committing them.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import samples
from description import describe
from legible import assert_legible
from matplotlib.figure import Figure
from samples import Arrays, around, make_arrays, make_effects, make_question, make_study, tabulate

from lit_lazy.figures import ablation, diagnostics, effects
from lit_lazy.table.build import TableSpec, build_table, read_table
from lit_lazy.table.declaration import MOST_CONTRASTS, Comparison, Statement
from lit_lazy.table.records import Column, Observation, RowInfo, Yardstick
from lit_lazy.table.results_table import Table

RUN_FIGURES = [
    *("attention_maps", "sink_heatmap", "mass_by_position", "sparsity_by_layer", "tau_by_layer", "parameters_by_head"),
    *("bias_curves", "value_norms", "sink_kinds", "rank_profile", "loss_by_length"),
]
"""All figures of a run, in reading order."""
ARRAYS = make_arrays()
DRAWN = Path(__file__).with_name("drawn.txt")
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def draw_map(weights: Arrays | np.ndarray) -> Figure | None:
    return diagnostics.attention_maps({"maps/weights": weights[None], "maps/heads": np.array([[0, 2]])})


def make_map(n: int, **changed: float) -> np.ndarray:
    weights = np.tril(np.full((n, n), 1 / n)).astype(np.float16)
    for place, weight in changed.items():
        weights[int(place[1]), int(place[2])] = weight
    return weights


def without(arrays: Arrays, value: float, *names: str) -> Arrays:
    return arrays | {name: np.full_like(arrays[name], value) for name in names}


def read(name: str) -> Table:
    return read_table(RESULTS / name / "table.json")


@functools.cache
def draw_run() -> dict[str, Figure]:
    return diagnostics.draw_run_figures(ARRAYS, "lazy, seed 3")


def make_lengths() -> Arrays:
    """Two lengths, with the thresholds of each and a cache that evicts."""
    arrays = make_arrays(length=32, lengths=(64,)) | {"context": np.array(32)}
    rng = np.random.default_rng(1)
    for prefix, n in (("", 32), ("L64/", 64)):
        arrays[f"{prefix}length/theta"] = rng.random((2, 4, n))
        arrays[f"{prefix}streamed/theta"] = rng.random((2, 4, n))
        arrays[f"{prefix}streamed/loss"] = 2 + rng.random(n)
        arrays[f"{prefix}streamed/kept"] = np.array([4, 28])
    return arrays


NEGATIVE = dict.fromkeys(("mass/row", "mass/first_key"), np.array([[[-0.5, -1.0]]], np.float32))
OF_HEADS = {
    "zeros, tiny and small weights": lambda: draw_map(make_map(10, w52=0, w62=1e-7, w72=1e-4)),
    "weights below zero": lambda: draw_map(make_map(4, w30=-0.25, w20=-0.01)),
    "negative mass": lambda: diagnostics.mass_by_position(NEGATIVE | {"sample": np.array([1, 2, 1])}),
    "a head without mass": lambda: diagnostics.sink_heatmap(without(make_arrays(layers=3), np.nan, "sink/share")),
    "no sparsity": lambda: diagnostics.sparsity_by_layer(
        without(ARRAYS, np.nan, *(f"{at}sparsity/{name}" for at in ("", "init/") for name in ("zero", "null")))
    ),
    "no null": lambda: diagnostics.sparsity_by_layer(without(ARRAYS, np.nan, "sparsity/null", "init/sparsity/null")),
    "no tiles": lambda: diagnostics.sparsity_by_layer(
        without(ARRAYS, np.nan, "sparsity/block_64", "init/sparsity/block_64")
    ),
    "a tau per position": lambda: diagnostics.tau_by_layer(
        {"tau": ARRAYS["tau"][..., None] + np.array([-1.0, 0.0, 1.0])}
    ),
    "many biases": lambda: diagnostics.bias_curves(make_arrays(heads=5)),
    "lengths with a cache": lambda: diagnostics.loss_by_length(make_lengths()),
}


def bounded() -> Table:
    """Intervals reach beyond what sparsity can be."""
    columns = (
        Column("loss/excess", "excess loss", "lower", unit="nats"),
        Column("sparsity/zero", "sparsity", unit="%", scale=100, bounds=(0.0, 1.0)),
    )
    values = {}
    for name, of in {"lazy": (0.2, 0.9, 0.99), "low": (0.01, 0.1, 0.7)}.items():
        values[name] = [{"loss/excess": 0.01 + 0.001 * i, "sparsity/zero": value} for i, value in enumerate(of)]
    return tabulate(values, columns)


def of_parts(**parts: tuple[str, str]) -> tuple[Table, dict]:
    """Rows of normalisers and positions of these classes, and their losses over training."""
    cells = [
        Observation(name, 0, "complete", {"loss/val": 1.0, "sparsity/zero": 0.5}, normaliser=rule, position=position)
        for name, (rule, position) in parts.items()
    ]
    rows = [RowInfo(name, "ours", (0,), "tiny") for name in parts]
    columns = Column("loss/val", "loss"), Column("sparsity/zero", "sparsity")
    spec = TableSpec("study", "tiny", next(iter(parts)), rows, columns, (), "make")
    return build_table(spec, cells), {name: make_losses("val/loss", i) for i, name in enumerate(parts)}


def make_losses(metric: str, level: float = 0.0) -> list[dict]:
    return [{metric: [(8, 4.0), (16, last + level)]} for last in (1.0, 3.0)]


PARTS = {"a": ("Softmax", "Rope"), "b": ("Elastic", "Rope"), "c": ("MyRule", "Rope"), "d": ("Elastic", "NoPosition")}


def make_trained() -> tuple[Table, dict]:
    return make_study(baseline=samples.BASELINE), samples.make_trainings()


ENDED = {"lazy": [{"watch/tau_layer_0": list(enumerate(x))} for x in ((1.0, 2.0, 9.0), (1.0, 4.0))] + [{}]}
UNDEFINED = {"lazy": [{"watch/first_key_share": [(0, float("nan")), (1, 0.5)]}]}
OF_VARIANTS = {
    "losses and sparsities": lambda: ablation.loss_against_sparsity(make_study()),
    "intervals beyond a bound": lambda: ablation.loss_against_sparsity(bounded()),
    "tau over training": lambda: ablation.parameter_over_training(*make_trained()),
    "sinks over training": lambda: ablation.sink_over_training(*make_trained()),
    "a training that ended early": lambda: ablation.parameter_over_training(make_study(), ENDED),
    "a share that was undefined": lambda: ablation.sink_over_training(make_study(), UNDEFINED),
    "the 10 lowest of many": lambda: ablation.loss_against_sparsity(read("rivals_rates-backcopy")),
    "losses over training": lambda: ablation.loss_over_training(*of_parts(**PARTS)),
    "losses above the optimum": lambda: ablation.loss_over_training(make_study(), {"lazy": make_losses("val/excess")}),
    "colours of normalisers": lambda: ablation.loss_against_sparsity(of_parts(**PARTS)[0]),
    "colours of positions": lambda: ablation.loss_against_sparsity(of_parts(b=PARTS["b"], d=PARTS["d"])[0]),
}


def unlearned() -> Table:
    """One row did not learn."""
    table = replace(make_effects(), yardstick=Yardstick("loss", 1.0, {}))
    return samples.override(table, unlearned={samples.EFFECTS[3]: "5 of 5"})


def three(**values: tuple[float, float, float]) -> Figure:
    return effects.effects_figure(tabulate(values, baseline="base"), ["loss"])


OF_EFFECTS = {
    "effects": lambda: effects.effects_figure(make_effects(), ["recall", "loss"]),
    "effects of one column": lambda: effects.effects_figure(
        make_effects(warnings=("Undertrained: the loss still falls. " * 4,)), ["loss"]
    ),
    "effects without a value": lambda: effects.effects_figure(make_effects(), ["loss", "recall", "sparsity"]),
    "one row did not learn": lambda: effects.effects_figure(unlearned(), ["loss", "recall"]),
    "no row learned": lambda: effects.effects_figure(
        replace(make_effects(), yardstick=Yardstick("loss", -1e9, {"chance": 0.0})), ["loss", "recall"]
    ),
    "effects of the rivals": lambda: effects.effects_figure(read("rivals-backcopy"), read("rivals-backcopy").compared),
    "a range": lambda: three(a=(1.0, 1.0, 1.0), b=(2.0, 2.5, 3.0), base=(0.5, 0.7, 1.0)),
    "a range cut": lambda: three(base=(0.0, 0.0, 0.0), a=(1.0, 1.1, 1.2), b=(0.2, 0.3, 9.0)),
}


def first_contrast(name: str) -> Table:
    table = read(name)
    assert table.verdict is not None
    looks = tuple(replace(look, parts=look.parts[:1]) for look in table.verdict.looks)
    return samples.override(table, verdict=replace(table.verdict, parts=table.verdict.parts[:1], looks=looks))


def most_contrasts() -> Table:
    names = [f"new, {i} times as far{' and so on' * 9}" for i in range(MOST_CONTRASTS)]
    return make_question("lower", {"old": [1.0] * 80} | {name: around(0.9, 0.5, 80) for name in names})


MET = Statement("sink", Comparison("new", "<", 0.25, "old"), rivals=("kept",))
ALONE = {"old": [0.4] * 20, "new": [0.01] * 9 + [0.3] + [0.01] * 10, "kept": [0.4] * 20}
LOOKS = {"old": [1.0] * 40, "new a": around(0.5, 0.1, 10), "new b": around(0.92, 0.2, 40)}
OF_VERDICTS = {
    "most contrasts": most_contrasts,
    "one contrast": lambda: first_contrast("q_cost_2-stdlib_long"),
    "one contrast of shares": lambda: first_contrast("q_mask_2-backcopy"),
    "looks": lambda: make_question("lower", LOOKS),
    "a statement": lambda: make_question("alone", ALONE, statements=(MET,), contrasts={"sink": MET.weights}),
    **{
        f"rule {rule}": lambda rule=rule: make_question(rule, {"old": [1.0] * 20, "new a": around(0.93, 0.5, 20)})
        for rule in ("higher", "same", "no_worse", "removed")
    },
}
SCENES: dict[str, Callable[[], Figure | None]] = {
    **{f"run: {name}": lambda name=name: draw_run()[name] for name in RUN_FIGURES},
    **OF_HEADS,
    **OF_VARIANTS,
    **OF_EFFECTS,
    **{f"verdict: {name}": lambda make=make: effects.verdict_figure(make()) for name, make in OF_VERDICTS.items()},
}


def draw(name: str) -> str:
    figure = SCENES[name]()
    assert figure is not None
    described = "\n".join([f"== {name}", *describe(figure), ""])
    assert_legible(figure)
    return described


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SCENES)
def test_a_figure_is_drawn_as_before_and_is_legible(name: str) -> None:
    found = draw(name)
    start = f"== {name}\n"
    _, _, expected = DRAWN.read_text().partition(start)
    assert found.splitlines() == (start + expected.partition("\n== ")[0]).splitlines()


def test_every_recorded_figure_is_drawn() -> None:
    recorded = [line.removeprefix("== ") for line in DRAWN.read_text().splitlines() if line.startswith("== ")]
    assert recorded == [*SCENES]


if __name__ == "__main__":
    DRAWN.write_text("".join(draw(name) for name in SCENES))
