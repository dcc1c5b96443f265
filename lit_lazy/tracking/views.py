"""MLflow views as code: the saved views of an experiment's runs page, and the links that open them.

MLflow keeps the entries of its "Views" menu in tags of the experiment. The format is not documented: this module alone
knows it, `tests/tracking/test_dashboard.py` holds it to the pinned version in a real browser, and elsewhere the plain
link still opens the list of runs.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean
from typing import Any
from urllib.parse import quote

from lit_lazy.support.outliers import compute_far_limit

TAG_PREFIX = "mlflow.sharedViewState."
TABLE_VIEW, CELLS_VIEW = "Variants (mean over seeds)", "All cells"
CHARTS_VIEW, AXES_VIEW = "Charts", "Parallel coordinates"
RUNS_VIEW = "All runs"
CHART_VIEWS = (CHARTS_VIEW, AXES_VIEW)
"""The views that are no lists of runs."""
LINKED_VIEWS = {
    "by variant": TABLE_VIEW,
    "all cells": CELLS_VIEW,
    "charts": CHARTS_VIEW,
    "parallel coordinates": AXES_VIEW,
    "all runs": RUNS_VIEW,
}
"""The views by what `lit-lazy dashboard` calls their links."""

RESULTS, TRADE_OFFS, TRAINING = "Results by variant", "Loss against what attention does", "During training"
EXTRA = ("sink/rate", "sparsity/zero", "collapse/effective_rank")
"""Metrics with charts in every ablation whose cells have them."""
LOSSES = ("loss/excess", "loss/bits_per_byte", "loss/val")
LOSS = "loss/val"
"""Every run's, lower is better: lists are sorted by it, and rows that are far above the others in it left out."""
LOSS_CURVES = ("val/excess", "val/loss")
"""The first that cells have is drawn."""
EXCESS = "val/excess"
"""Above 0 and falling by powers of ten: its axis is logarithmic."""
WATCHED = ("watch/first_key_share", "watch/sparsity", "watch/mass", "watch/effective_rank")
"""From step 0 on, at powers of two."""
TAU_LAYER = re.compile(r"watch/tau_layer_(\d+)")
MOST_AXES_CHARTS = 3
MOST_SETTINGS = 12
"""Columns of settings in which the runs of an experiment differ."""
RUN_NAME = "attributes.`Run Name`"
NAME_WIDTH, LEAST_WIDTH, PADDING, LETTER_WIDTH = 270, 160, 20, 7
"""Of columns, in pixels. MLflow shows all digits of a number; cut off, 1.7e-7 would read as 1.7."""

COLOUR_TAG, ROW_TAG, CHARTED_TAG = "mlflow.runColor", "row", "charted"
"""The first is MLflow's own. `row` holds a cell's variant with spaces behind it, as `group_of` puts them there.
`charted` is "no" where the loss is far above: a saved view cannot hide runs, it can only look for others."""
PALETTE = (
    *("#a6630c", "#c83243", "#b45091", "#8a63bf", "#434a93", "#137dae", "#04867d", "#308613", "#facb66", "#1f272d"),
    *("#445461", "#5f7281", "#8396a5", "#93320b", "#be501e", "#de7921", "#f2be88", "#115026", "#277c43", "#3ba65e"),
    *("#8ddda8", "#9e102c", "#c82d4c", "#e65b77", "#f792a6", "#0e538b", "#2272b4", "#4299e0", "#8acaff"),
)
"""MLflow's colours: it gives each group of runs one of them, by a checksum of its name."""
DISTINCT = (
    *(26, 14, 7, 2, 8, 6, 9, 20, 28, 22, 24, 17, 11, 3, 19, 16, 4, 0, 15, 18, 23, 27, 13, 12, 21, 25, 5, 10, 1),
)  # fmt: skip
"""Places of the palette: the figures' blue and vermillion, then always the one that differs most from those before it
(distances in CIELAB)."""
AS_IN_FIGURES = {"Elastic": DISTINCT[0], "Softmax": DISTINCT[1]}


@dataclass(frozen=True)
class CellRun:
    """What the views have to know of a cell's run, or of a run that is no cell: its variant is its name."""

    variant: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    """What it has logged, by name: the last value."""


def encode_view(name: str, state: Mapping[str, Any]) -> tuple[str, str]:
    """Tag key and value that make a saved view called `name`. The same name gives the same key."""
    packed = "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    value = json.dumps({"name": name, "createdAt": 0, "updatedAt": 0, "state": packed})
    return TAG_PREFIX + view_id(name), value


def view_id(name: str) -> str:
    """The id under which a view's link finds it; charts and sections have such ids too."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def get_normaliser_name(params: Mapping[str, str]) -> str:
    """The class of a run's normaliser, or of its mixer where that does not attend; empty where none is logged."""
    mixer = params.get("model.mixer", "SelfAttention")
    return params.get("model.attention.normaliser", "") if mixer == "SelfAttention" else mixer


def assign_colours(rows: Mapping[str, str]) -> dict[str, str]:
    """The colour of each row, as far as the palette reaches all different. rows: the class of the normaliser by row.

    The first row with Elastic-Softmax and the first with softmax have the colours that these have in the figures.
    """
    taken: dict[str, int] = {}
    for row, normaliser in rows.items():
        if normaliser in AS_IN_FIGURES and AS_IN_FIGURES[normaliser] not in taken.values():
            taken[row] = AS_IN_FIGURES[normaliser]
    others = cycle([place for place in DISTINCT if place not in taken.values()])
    return {row: PALETTE[taken[row] if row in taken else next(others)] for row in rows}


def make_group_name(row: str, colour: str) -> str:
    """A row's name with as many spaces behind it as make MLflow draw the group of that name in a colour.

    It keeps no colours of groups where it keeps views, and no one sees the spaces.
    """
    while PALETTE[checksum(_group_id(ROW_TAG, row)) % len(PALETTE)] != colour:
        row += " "
    return row


def checksum(name: str) -> int:
    """Fletcher's, of UTF-16 units, as MLflow's pages compute it."""
    units = name.encode("utf-16-le")
    low = high = 0
    for first, second in zip(units[::2], units[1::2], strict=True):
        low = (low + first + 256 * second) % 255
        high = (high + low) % 255
    return low | high << 8


def _group_id(tag: str, value: str) -> str:
    return f"tag.{tag}.{value}"


def build_views(
    axes: Sequence[str],
    columns: Sequence[str],
    main: Sequence[str],
    cells: Sequence[CellRun],
    groups: Mapping[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """The states of an ablation's views, by name.

    axes: params in which cells differ. columns: metrics of the table. main: those of them that charts show; the first
    that cells have is what all else is held against. cells: what is known of the cells; nothing while there are none,
    and then every chart that they may come to fill is there. groups: by variant what the cells have as their `row`,
    and all have `charted`; None while some have not, when they are grouped by variant and all are drawn.
    """
    logged = {name for cell in cells for name in cell.metrics}

    def select_measured(names: Sequence[str]) -> list[str]:
        return [name for name in dict.fromkeys(names) if name in logged or not cells]

    shown = select_measured([*main, *EXTRA])
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    tag, values = ("variant", {name: name for name in variants}) if groups is None else (ROW_TAG, groups)
    far = () if groups is None else find_outlier_rows(cells)
    near = {} if groups is None else {"searchFilter": f"tags.kind = 'cell' AND tags.{CHARTED_TAG} = 'yes'"}
    without = f", without {', '.join(far)}" if far else ""
    return {
        TABLE_VIEW: _build_run_list("cell", shown, axes) | _build_grouping(tag, values),
        CELLS_VIEW: _build_run_list("cell", select_measured(columns), axes),
        CHARTS_VIEW: _build_run_list("cell", shown, axes)
        | _build_grouping(tag, values)
        | near
        | _sections(
            {
                RESULTS + without: [_bar(name) for name in shown],
                TRADE_OFFS: [_scatter(name, shown[0]) for name in select_measured(EXTRA) if name != shown[0]],
                TRAINING: [_line(name) for name in _select_curves(select_measured, logged)],
            },
            logged,
        ),
        AXES_VIEW: _build_run_list("cell", shown, axes)
        | near
        | _sections(
            {
                title + without: [_parallel(title, chosen, shown[0])]
                for title, chosen in _find_axis_sets(axes, cells).items()
                if shown
            },
            logged,
            columns=1,
        ),
    }


def build_run_views(runs: Sequence[CellRun]) -> dict[str, dict[str, Any]]:
    """The states of the views of an experiment whose runs are no cells, by name: `views` without groups.

    Columns are the settings in which the runs differ.
    """
    logged = {name for run in runs for name in run.metrics}

    def select_measured(names: Sequence[str]) -> list[str]:
        return [name for name in dict.fromkeys(names) if name in logged or name in (*LOSS_CURVES, *WATCHED)]

    values: dict[str, set[str]] = {}
    for run in runs:
        for name, value in run.params.items():
            values.setdefault(name, set()).add(value)
    settings = [name for name, found in values.items() if len(found) > 1][:MOST_SETTINGS]
    shown = select_measured([*LOSSES, *EXTRA])
    curves = [_line(name) for name in ("train/loss", *_select_curves(select_measured, logged))]
    return {
        CHARTS_VIEW: _build_run_list("run", shown, settings)
        | _sections({TRAINING: curves, "Results": [_bar(name) for name in shown]}, logged),
        RUNS_VIEW: _build_run_list("run", shown, settings),
    }


def find_outlier_rows(cells: Sequence[CellRun]) -> list[str]:
    """The variants whose mean loss is so far above that in a chart with them all others would look alike."""
    losses: dict[str, list[float]] = {}
    for cell in cells:
        if LOSS in cell.metrics:
            losses.setdefault(cell.variant, []).append(cell.metrics[LOSS])
    means = {variant: fmean(found) for variant, found in losses.items()}
    highest = compute_far_limit(means.values())
    return [variant for variant, mean in means.items() if mean > highest]


def _build_run_list(kind: str, metrics: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
    """The runs of a kind as a flat list, each metric and each setting a column.

    It is sorted by a metric, because MLflow hides child runs under their parent while a list is sorted by creation.
    """
    tags = ("variant", "seed") if kind == "cell" else ("seed",)
    shown = {
        **{f"metrics.`{name}`": name for name in metrics},
        **{f"params.`{name}`": name for name in settings},
        **{f"tags.`{name}`": name for name in tags},
    }
    widths = {column: max(LEAST_WIDTH, PADDING + LETTER_WIDTH * len(name)) for column, name in shown.items()}
    return {
        "searchFilter": f"tags.kind = '{kind}'",
        "orderByKey": f"metrics.`{LOSS}`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "runsHiddenMode": "SHOW_ALL",
        "selectedColumns": list(shown),
        "columnOrder": [RUN_NAME, *shown],
        "columnWidths": {RUN_NAME: NAME_WIDTH} | widths,
    }


def _build_grouping(tag: str, values: Mapping[str, str]) -> dict[str, Any]:
    """One row per variant, its mean over seeds; its cells are folded away. values: of the tag, by variant."""
    return {
        "groupBy": {
            "groupByKeys": [{"mode": "tag", "groupByData": tag}],
            "aggregateFunction": "average",
        },
        "groupsExpanded": {_group_id(tag, value): False for value in values.values()},
        "useGroupedValuesInCharts": True,
    }


def _select_curves(measured: Callable[[Sequence[str]], list[str]], logged: Collection[str]) -> list[str]:
    """The metrics of a training that are worth a curve; no two of them are the same."""
    return [*measured(LOSS_CURVES)[:1], *measured([*WATCHED, *_select_tau_curves(logged)])]


def _select_tau_curves(logged: Collection[str]) -> list[str]:
    """The metrics of the first and the last layer's tau."""
    layers = sorted(int(found[1]) for name in logged if (found := TAU_LAYER.fullmatch(name))) or [0]
    return [f"watch/tau_layer_{layer}" for layer in dict.fromkeys((*layers[:1], *layers[-1:]))]


def _find_axis_sets(axes: Sequence[str], cells: Sequence[CellRun]) -> dict[str, list[str]]:
    """Titles of sections, and axes that the cells spoken of all have and in which they differ; most cells first.

    MLflow's parallel coordinates leave out a cell that lacks one of the params: one chart of all axes would lose most.
    """
    if not cells:
        return {"Every cell": list(axes)}
    holders = {axis: frozenset(i for i, cell in enumerate(cells) if axis in cell.params) for axis in axes}
    found: dict[str, list[str]] = {}
    for holding in sorted(set(holders.values()), key=len, reverse=True):
        chosen = [a for a in axes if holding <= holders[a] and len({cells[i].params[a] for i in holding}) > 1]
        own = next(axis for axis in axes if holders[axis] == holding)
        if chosen and not any(set(chosen) <= set(former) for former in found.values()):
            found["Every cell" if len(holding) == len(cells) else f"The {len(holding)} cells that have {own}"] = chosen
    return dict(list(found.items())[:MOST_AXES_CHARTS])


def _bar(metric: str) -> dict[str, Any]:
    return _chart("BAR", f"bar {metric}", metricKey=metric)


def _line(metric: str) -> dict[str, Any]:
    """A curve as it was measured: unless it is told not to, MLflow smooths, and draws what was measured beside it."""
    return _chart(
        "LINE",
        f"line {metric}",
        metricKey=metric,
        selectedMetricKeys=[metric],
        xAxisKey="step",
        scaleType="log" if metric == EXCESS else "linear",
        xAxisScaleType="log" if metric.startswith("watch/") else "linear",
        lineSmoothness=0,
        displayPoints=False,
    )


def _scatter(x: str, y: str) -> dict[str, Any]:
    return _chart("SCATTER", f"scatter {x} {y}", xaxis={"key": x, "type": "METRIC"}, yaxis={"key": y, "type": "METRIC"})


def _parallel(title: str, axes: Sequence[str], metric: str) -> dict[str, Any]:
    return _chart("PARALLEL", title, selectedParams=list(axes), selectedMetrics=[metric], showAllRuns=True)


def _chart(kind: str, known_as: str, **options: Any) -> dict[str, Any]:
    common = {"runsCountToCompare": 1000, "deleted": False, "isGenerated": False}
    return {"uuid": view_id(known_as), "type": kind, **common, **options}


def _sections(
    charts: Mapping[str, Sequence[dict[str, Any]]], logged: Collection[str], columns: int = 2
) -> dict[str, Any]:
    """Sections of charts, open; below them, folded, those that MLflow makes of all other metrics by their groups."""
    own = [name for name, within in charts.items() if within]
    drawn = {chart.get("metricKey") for within in charts.values() for chart in within}
    groups = sorted({name.rpartition("/")[0] or "Model metrics" for name in logged if name not in drawn})
    return {
        "compareRunCharts": [chart | {"metricSectionId": view_id(name)} for name in own for chart in charts[name]],
        "compareRunSections": [
            *(_section(name, display=True) | {"columns": columns} for name in own),
            *(_section(name, display=False) for name in groups),
        ],
        "isAccordionReordered": True,  # else MLflow sorts sections by name
        "hideEmptyCharts": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def _section(name: str, display: bool) -> dict[str, Any]:
    state = {"display": display, "isReordered": False, "deleted": False, "isGenerated": False}
    return {"uuid": view_id(name), "name": name, **state}


def runs_link(ui_url: str, experiment_id: str, view: str | None = None) -> str:
    """Link to an experiment's training runs (a bare link would open MLflow's GenAI page), in a saved view if named."""
    link = f"{ui_url}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    if view is None:
        return link
    mode = "&compareRunsMode=CHART" if view in CHART_VIEWS else ""
    return f"{link}&viewStateShareKey={quote(view_id(view))}{mode}"


def run_link(ui_url: str, experiment_id: str, run_id: str, artifact: str | None = None) -> str:
    """Link to a run, or to one of its artifacts."""
    page = f"{ui_url}/#/experiments/{experiment_id}/runs/{run_id}"
    if artifact is not None:
        page += f"/artifacts/{quote(artifact)}"
    return f"{page}?workflowType=machine_learning"
