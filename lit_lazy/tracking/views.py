"""MLflow views as code: the saved views of an experiment's runs page, and the links that open them.

MLflow keeps the entries of its "Views" menu in tags of the experiment. The format is not documented: this module alone
knows it, `tests/test_dashboard.py` holds it to the pinned version in a real browser, and elsewhere the plain link still
opens the list of runs.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

TAG_PREFIX = "mlflow.sharedViewState."
TABLE_VIEW, CELLS_VIEW = "Variants (mean over seeds)", "All cells"
CHARTS_VIEW, AXES_VIEW = "Charts", "Parallel coordinates"
CHART_VIEWS = (CHARTS_VIEW, AXES_VIEW)
"""The views that are no lists of runs."""
LINKED_VIEWS = {
    "by variant": TABLE_VIEW,
    "all cells": CELLS_VIEW,
    "charts": CHARTS_VIEW,
    "parallel coordinates": AXES_VIEW,
}
"""The views by what `lit-lazy dashboard` calls their links."""

RESULTS, TRADE_OFFS, TRAINING = "Results by variant", "Loss against what attention does", "During training"
EXTRA = ("sink/rate", "sparsity/zero", "collapse/effective_rank")
"""Metrics with charts in every ablation whose cells have them."""
LOSS_CURVES = ("val/excess", "val/loss")
"""The first that cells have is drawn."""
WATCHED = ("watch/first_key_share", "watch/sparsity", "watch/mass", "watch/effective_rank")
TAU_LAYER = re.compile(r"watch/tau_layer_(\d+)")
MOST_AXES_CHARTS = 3
RUN_NAME = "attributes.`Run Name`"
NAME_WIDTH, LEAST_WIDTH, PADDING, LETTER_WIDTH = 270, 110, 20, 7
"""Of columns, in pixels."""


@dataclass(frozen=True)
class CellRun:
    """What the views have to know of a cell's run."""

    variant: str
    params: Mapping[str, str]
    metrics: Collection[str]
    """The names of what it has logged."""


def saved_view(name: str, state: Mapping[str, Any]) -> tuple[str, str]:
    """Tag key and value that make a saved view called `name`. The same name gives the same key."""
    packed = "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    value = json.dumps({"name": name, "createdAt": 0, "updatedAt": 0, "state": packed})
    return TAG_PREFIX + view_id(name), value


def view_id(name: str) -> str:
    """The id under which a view's link finds it; charts and sections have such ids too."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def views(
    axes: Sequence[str], columns: Sequence[str], main: Sequence[str], cells: Sequence[CellRun]
) -> dict[str, dict[str, Any]]:
    """The states of an ablation's views, by name.

    axes: params in which cells differ. columns: metrics of the table. main: those of them that charts show; the first
    that cells have is what all else is held against. cells: what is known of the cells; nothing while there are none,
    and then every chart that they may come to fill is there.
    """
    logged = {name for cell in cells for name in cell.metrics}

    def measured(names: Sequence[str]) -> list[str]:
        return [name for name in dict.fromkeys(names) if name in logged or not cells]

    shown = measured([*main, *EXTRA])
    variants = list(dict.fromkeys(cell.variant for cell in cells))
    table = _cells(axes, measured(columns))
    return {
        TABLE_VIEW: table | _grouped(variants),
        CELLS_VIEW: table,
        CHARTS_VIEW: table
        | _grouped(variants)
        | _sections(
            {
                RESULTS: [_bar(name) for name in shown],
                TRADE_OFFS: [_scatter(name, shown[0]) for name in measured(EXTRA) if name != shown[0]],
                TRAINING: [
                    _line(name) for name in (*measured(LOSS_CURVES)[:1], *measured([*WATCHED, *_tau_curves(logged)]))
                ],
            },
            logged,
        ),
        AXES_VIEW: table
        | _sections(
            {title: [_parallel(title, chosen, shown[0])] for title, chosen in _axis_sets(axes, cells).items() if shown},
            logged,
            columns=1,
        ),
    }


def _cells(axes: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    """The cells as a flat list, each axis and each metric a column.

    It is sorted by a metric, because MLflow hides child runs under their parent while a list is sorted by creation.
    """
    shown = {
        **{f"metrics.`{name}`": name for name in metrics},
        **{f"params.`{name}`": name for name in axes},
        **{f"tags.`{name}`": name for name in ("variant", "seed")},
    }
    widths = {column: max(LEAST_WIDTH, PADDING + LETTER_WIDTH * len(name)) for column, name in shown.items()}
    return {
        "searchFilter": "tags.kind = 'cell'",
        "orderByKey": "metrics.`loss/val`",
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


def _grouped(variants: Sequence[str]) -> dict[str, Any]:
    """One row per variant, its mean over seeds; its cells are folded away."""
    return {
        "groupBy": {
            "groupByKeys": [{"mode": "tag", "groupByData": "variant"}],
            "aggregateFunction": "average",
        },
        "groupsExpanded": {f"tag.variant.{variant}": False for variant in variants},
        "useGroupedValuesInCharts": True,
    }


def _tau_curves(logged: Collection[str]) -> list[str]:
    """The metrics of the first and the last layer's tau."""
    layers = sorted(int(found[1]) for name in logged if (found := TAU_LAYER.fullmatch(name))) or [0]
    return [f"watch/tau_layer_{layer}" for layer in dict.fromkeys((*layers[:1], *layers[-1:]))]


def _axis_sets(axes: Sequence[str], cells: Sequence[CellRun]) -> dict[str, list[str]]:
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
    return _chart("LINE", f"line {metric}", metricKey=metric, selectedMetricKeys=[metric], xAxisKey="step")


def _scatter(x: str, y: str) -> dict[str, Any]:
    return _chart("SCATTER", f"scatter {x} {y}", xaxis={"key": x, "type": "METRIC"}, yaxis={"key": y, "type": "METRIC"})


def _parallel(title: str, axes: Sequence[str], metric: str) -> dict[str, Any]:
    return _chart("PARALLEL", title, selectedParams=list(axes), selectedMetrics=[metric], showAllRuns=True)


def _chart(kind: str, known_as: str, **options: Any) -> dict[str, Any]:
    common = {"runsCountToCompare": 1000, "deleted": False, "isGenerated": False}
    return {"uuid": view_id(known_as), "type": kind, **common, **options}


def _sections(
    charts: Mapping[str, Sequence[dict[str, Any]]], logged: Collection[str], columns: int = 3
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
