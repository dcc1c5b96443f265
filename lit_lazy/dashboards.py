"""MLflow views as code: the state of a saved view of an experiment's runs page, and the links that open it.

MLflow keeps the entries of its "Views" menu in tags of the experiment. The format is not documented; a browser test
holds it to the pinned version, and elsewhere the plain link still opens the list of runs.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Sequence
from urllib.parse import quote

TAG_PREFIX = "mlflow.sharedViewState."


def saved_view(name: str, state: dict[str, object]) -> tuple[str, str]:
    """Tag key and value that make a saved view called `name`. The same name gives the same key."""
    packed = "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    value = json.dumps({"name": name, "createdAt": 0, "updatedAt": 0, "state": packed})
    return TAG_PREFIX + view_id(name), value


def view_id(name: str) -> str:
    """The id under which a view's link finds it."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def cells_view(axes: Sequence[str], metrics: Sequence[str], group_by_variant: bool) -> dict[str, object]:
    """State of a view of an ablation's cells: flat, each axis and each metric of the table a column.

    It is sorted by a metric, because MLflow hides child runs under their parent while a list is sorted by creation.
    """
    state: dict[str, object] = {
        "searchFilter": "tags.kind = 'cell'",
        "orderByKey": "metrics.`loss/val`",
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "runsHiddenMode": "SHOWALL",
        "selectedColumns": [
            "tags.`variant`",
            "tags.`seed`",
            *(f"params.`{axis}`" for axis in axes),
            *(f"metrics.`{metric}`" for metric in metrics),
        ],
    }
    if group_by_variant:
        state["groupBy"] = {
            "groupByKeys": [{"mode": "tag", "groupByData": "variant"}],
            "aggregateFunction": "average",
        }
    return state


def runs_link(ui_url: str, experiment_id: str, view: str | None = None) -> str:
    """Link to an experiment's training runs (a bare link would open MLflow's GenAI page), in a saved view if named."""
    link = f"{ui_url}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    return link if view is None else f"{link}&viewStateShareKey={quote(view_id(view))}"


def run_link(ui_url: str, experiment_id: str, run_id: str, artifact: str) -> str:
    """Link to one artifact of a run."""
    page = f"{ui_url}/#/experiments/{experiment_id}/runs/{run_id}/artifacts/{quote(artifact)}"
    return f"{page}?workflowType=machine_learning"
