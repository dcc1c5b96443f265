"""Saved views of an experiment's runs page in MLflow, and the links that open them.

MLflow stores the entries of its "Views" menu as experiment tags in an undocumented format. Only this module depends on
that format; `tests/tracking/test_dashboard.py` checks it for the pinned version in a browser. With another version the
plain link still opens the list of runs.
"""

import base64
import hashlib
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from lit_lazy.support.scale_limit import compute_far_limit

if TYPE_CHECKING:
    from mlflow.entities import RunData

State = dict[str, Any]
TAG_PREFIX = "mlflow.sharedViewState."
TABLE_VIEW, CELLS_VIEW, RUNS_VIEW = "Variants (mean over seeds)", "All cells", "All runs"
CHARTS_VIEW, AXES_VIEW = CHART_VIEWS = "Charts", "Parallel coordinates"
LINKED_VIEWS = {
    "by variant": TABLE_VIEW,
    "all cells": CELLS_VIEW,
    "charts": CHARTS_VIEW,
    "parallel coordinates": AXES_VIEW,
    "all runs": RUNS_VIEW,
}
"""The views by their link label in `lit-lazy dashboard`."""

RESULTS, TRADE_OFFS, TRAINING = "Results by variant", "Loss against what attention does", "During training"
EXTRA = ("sink/rate", "sparsity/zero", "collapse/effective_rank")
"""Metrics that get charts in every ablation whose cells log them."""
LOSSES = ("loss/excess", "loss/bits_per_byte", "loss/val")
LOSS = LOSSES[-1]
"""The loss of every run: lists are sorted by it, and rows with an outlying value are left out of charts."""
LOSS_CURVES = ("val/excess", "val/loss")
"""Only the first that cells have is drawn. The excess falls by powers of ten, so it gets a logarithmic axis."""
WATCHED = ("watch/first_key_share", "watch/sparsity", "watch/mass", "watch/effective_rank")
"""Measured at step 0, at powers of two and at each validation."""
LEARNED_LAYER = re.compile(r"watch/(tau|learned/[\w.]+)_layer_(\d+)")
"""Mean of a learned parameter in a layer."""
MOST_AXES_CHARTS = 3
MOST_SETTINGS = 12
"""Upper bound on columns for settings in which runs differ."""
RUN_NAME = "attributes.`Run Name`"
NAME_WIDTH, LEAST_WIDTH, PADDING, LETTER_WIDTH = 270, 160, 20, 7
"""Column widths in pixels. MLflow shows all digits of a number; truncated, 1.7e-7 would read as 1.7."""

CHARTED_TAG = "charted"
"""Set to "no" on cells of rows with an outlying loss: a saved view cannot hide runs, only filter by tags."""


def encode_view(name: str, state: Mapping[str, Any]) -> tuple[str, str]:
    """Tag key and value of a saved view; the key depends on the name only."""
    packed = "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    value = json.dumps({"name": name, "createdAt": 0, "updatedAt": 0, "state": packed})
    return TAG_PREFIX + view_id(name), value


def view_id(name: str) -> str:
    """Id of a view in links; also used for charts and sections."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def build_views(
    axes: Sequence[str], columns: Sequence[str], main: Sequence[str], cells: Sequence["RunData"], charted: bool = False
) -> dict[str, State]:
    """The states of an ablation's views, by view name.

    axes: params in which cells differ. columns: metrics of the table. main: the columns with charts; the first that
    cells have is the main metric. cells: without any, every possible chart is included. charted: whether all cells
    have the tag `charted`, by which charts leave out rows with an outlying loss.
    """
    logged = {name for cell in cells for name in cell.metrics}
    usable = logged if cells else None
    shown = _select([*main, *EXTRA], usable)
    far = find_outlier_rows(cells) if charted else ()
    near = {"searchFilter": f"tags.kind = 'cell' AND tags.{CHARTED_TAG} = 'yes'"} if charted else {}
    without, metric = f", without {', '.join(far)}" if far else "", {"type": "METRIC"}
    charts = {
        RESULTS + without: [_chart("BAR", f"bar {name}", metricKey=name) for name in shown],
        TRADE_OFFS: [
            _chart("SCATTER", f"scatter {x} {y}", xaxis=metric | {"key": x}, yaxis=metric | {"key": y})
            for y in shown[:1]
            for x in _select(EXTRA, usable)
            if x != y
        ],
        TRAINING: [_line(name) for name in _select_curves(usable)],
    }
    main_metric = {"selectedMetrics": shown[:1], "showAllRuns": True}
    parallel = {
        title + without: [_chart("PARALLEL", title, selectedParams=chosen, **main_metric)]
        for title, chosen in (_find_axis_sets(axes, cells) if shown else {}).items()
    }
    runs = _build_run_list("cell", shown, axes)
    grouping = {  # one collapsed row per variant, with means over seeds
        "groupBy": {"groupByKeys": [{"mode": "tag", "groupByData": "variant"}], "aggregateFunction": "average"},
        "groupsExpanded": {f"tag.variant.{cell.tags['variant']}": False for cell in cells},
        "useGroupedValuesInCharts": True,
    }
    return {
        TABLE_VIEW: runs | grouping,
        CELLS_VIEW: _build_run_list("cell", _select(columns, usable), axes),
        CHARTS_VIEW: runs | grouping | near | _sections(charts, logged),
        AXES_VIEW: runs | near | _sections(parallel, logged, columns=1),
    }


def build_run_views(runs: Sequence["RunData"]) -> dict[str, State]:
    """The states of the views of a `lit-lazy train` experiment, by view name; columns are settings that differ."""
    logged = {name for run in runs for name in run.metrics}
    usable = logged | {*LOSS_CURVES, *WATCHED}
    values = {(name, value): name for run in runs for name, value in run.params.items()}
    settings = [name for name, count in Counter(values.values()).items() if count > 1][:MOST_SETTINGS]
    shown = _select([*LOSSES, *EXTRA], usable)
    curves = [_line(name) for name in ("train/loss", *_select_curves(usable))]
    charts = {TRAINING: curves, "Results": [_chart("BAR", f"bar {name}", metricKey=name) for name in shown]}
    listed = _build_run_list("run", shown, settings)
    return {CHARTS_VIEW: listed | _sections(charts, logged), RUNS_VIEW: listed}


def find_outlier_rows(cells: Sequence["RunData"]) -> list[str]:
    """Variants whose mean loss would flatten the differences between all others in a chart."""
    losses = defaultdict[str, list[float]](list)
    for cell in cells:
        if LOSS in cell.metrics:
            losses[cell.tags["variant"]].append(cell.metrics[LOSS])
    means = {variant: fmean(found) for variant, found in losses.items()}
    highest = compute_far_limit(means.values())
    return [variant for variant, mean in means.items() if mean > highest]


def _build_run_list(kind: str, metrics: Sequence[str], settings: Sequence[str]) -> State:
    """The runs of a kind as a flat list with a column per metric and setting.

    Sorted by a metric, because MLflow nests child runs under their parent in a list sorted by creation time.
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


def _select(names: Sequence[str], usable: Collection[str] | None) -> list[str]:
    """The distinct names that runs have. usable: None before the first run, which may have any."""
    return [name for name in dict.fromkeys(names) if usable is None or name in usable]


def _select_curves(usable: Collection[str] | None) -> list[str]:
    """The metrics that get a curve; learned parameters but biases' in the first and the last layer."""
    layers: defaultdict[str, set[int]] = defaultdict(set)
    for name in usable or ():
        if found := LEARNED_LAYER.fullmatch(name):
            layers[found[1]].add(int(found[2]))
    layers = layers or defaultdict(set, tau={0})  # before the first cell
    ends = {name: dict.fromkeys((min(found), max(found))) for name, found in sorted(layers.items())}
    learned = [f"watch/{name}_layer_{layer}" for name, found in ends.items() for layer in found]
    return [*_select(LOSS_CURVES, usable)[:1], *_select([*WATCHED, *learned], usable)]


def _find_axis_sets(axes: Sequence[str], cells: Sequence["RunData"]) -> dict[str, list[str]]:
    """Axes by section title, most cells first: the cells of a section have all its axes and differ in each.

    MLflow's parallel coordinates omit a cell that lacks one of the params, so a chart of all axes would omit most.
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


def _line(metric: str) -> State:
    """A curve without MLflow's default smoothing."""
    scales = {
        "scaleType": "log" if metric == LOSS_CURVES[0] else "linear",
        "xAxisScaleType": "log" if metric.startswith("watch/") else "linear",
    }
    drawn = {"xAxisKey": "step", "lineSmoothness": 0, "displayPoints": False}
    return _chart("LINE", f"line {metric}", metricKey=metric, selectedMetricKeys=[metric], **scales, **drawn)


def _chart(kind: str, known_as: str, **options: Any) -> State:
    common = {"runsCountToCompare": 1000, "deleted": False, "isGenerated": False}
    return {"uuid": view_id(known_as), "type": kind, **common, **options}


def _sections(charts: Mapping[str, Sequence[State]], logged: Collection[str], columns: int = 2) -> State:
    """Open sections of charts, followed by MLflow's collapsed sections for all other metrics by their groups."""
    own = [name for name, within in charts.items() if within]
    drawn = {chart.get("metricKey") for within in charts.values() for chart in within}
    groups = sorted({name.rpartition("/")[0] or "Model metrics" for name in logged if name not in drawn})
    section = {"isReordered": False, "deleted": False, "isGenerated": False}
    return {
        "compareRunCharts": [chart | {"metricSectionId": view_id(name)} for name in own for chart in charts[name]],
        "compareRunSections": [
            *(section | {"uuid": view_id(name), "name": name, "display": True, "columns": columns} for name in own),
            *(section | {"uuid": view_id(name), "name": name, "display": False} for name in groups),
        ],
        "isAccordionReordered": True,  # else MLflow sorts sections by name
        "hideEmptyCharts": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def runs_link(ui_url: str, experiment_id: str, view: str | None = None) -> str:
    """Link to an experiment's training runs, in a saved view if given. A bare link would open MLflow's GenAI page."""
    link = f"{ui_url}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    if view is None:
        return link
    mode = "&compareRunsMode=CHART" if view in CHART_VIEWS else ""
    return f"{link}&viewStateShareKey={quote(view_id(view))}{mode}"
