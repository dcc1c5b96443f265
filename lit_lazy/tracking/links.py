"""Names of a store's experiments, and links to their MLflow pages."""

from dataclasses import dataclass

from mlflow.exceptions import MlflowException

from lit_lazy.support.errors import one_line
from lit_lazy.tracking.artifacts import open_artifacts
from lit_lazy.tracking.client import make_client
from lit_lazy.tracking.databases import has_content, sqlite_file
from lit_lazy.tracking.store import TrackingError
from lit_lazy.tracking.views import LINKED_VIEWS, TAG_PREFIX, run_link, runs_link, view_id

PARENT_PAGES = {"its table": "table.html", "its report": "report.html"}
"""Artifacts of a parent run by the label of their link."""


@dataclass(frozen=True)
class ExperimentLinks:
    """Links to the MLflow pages of one experiment, by label."""

    name: str
    pages: dict[str, str]


def find_experiment_links(uri: str, ui_url: str) -> list[ExperimentLinks]:
    """Links to every experiment with runs in a store, the most recently used first."""
    client = make_client(uri)
    links = []
    for experiment in client.search_experiments(order_by=["last_update_time DESC"]):
        number = experiment.experiment_id
        if not client.search_runs([number], max_results=1):
            continue
        pages = {
            label: runs_link(ui_url, number, view)
            for label, view in LINKED_VIEWS.items()
            if TAG_PREFIX + view_id(view) in experiment.tags
        }
        query = "tags.ablation LIKE '%' AND tags.kind != 'cell'"  # the parent run of an ablation or a search
        for parent in client.search_runs([number], query, order_by=["start_time DESC"], max_results=1):
            stored = {artifact.path for artifact in open_artifacts(client, parent.info.artifact_uri).list_artifacts()}
            pages |= {
                label: run_link(ui_url, number, parent.info.run_id, artifact)
                for label, artifact in PARENT_PAGES.items()
                if artifact in stored
            }
        links.append(ExperimentLinks(experiment.name, pages | {"runs": runs_link(ui_url, number)}))
    return links


def list_experiment_names(uri: str) -> list[str]:
    """Names of all experiments of a store; none if a local store does not exist, which is not created."""
    if (file := sqlite_file(uri)) is not None and not has_content(file):
        return []
    try:
        return [experiment.name for experiment in make_client(uri).search_experiments()]
    except MlflowException as error:
        raise TrackingError(one_line(error), reachable=True) from error
