"""All that knows MLflow: where runs are stored, how a run is logged, how runs are read back."""

import functools
import logging
import os
import socket
import sqlite3
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

import mlflow
import yaml
from filelock import FileLock
from mlflow.entities import LifecycleStage, Metric, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient
from mlflow.utils.file_utils import local_file_uri_to_path
from requests.exceptions import HTTPError, RequestException, RetryError
from sqlalchemy.exc import OperationalError

from lit_lazy.config.serialisation import flatten
from lit_lazy.support.disk import check_writable_folder, write_atomically
from lit_lazy.support.errors import UnfinishedError, iter_causes, one_line
from lit_lazy.support.secrets import redact_url, strip_user
from lit_lazy.support.timeout import call_with_timeout
from lit_lazy.tracking.databases import (
    check_sqlite,
    create_sqlite_file,
    has_content,
    query_database,
    quote_path,
    relocate_artifacts,
    sqlite_file,
    sqlite_url,
)
from lit_lazy.tracking.views import (
    CHARTED_TAG,
    COLOUR_TAG,
    LINKED_VIEWS,
    ROW_TAG,
    TAG_PREFIX,
    CellRun,
    assign_colours,
    build_run_views,
    build_views,
    encode_view,
    find_outlier_rows,
    get_normaliser_name,
    make_group_name,
    run_link,
    runs_link,
    view_id,
)

# MLflow tells of every database it creates, and trips over a deprecation of its own.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*``noload`` loader strategy is deprecated.*")

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# Calls that fail are made again by `lit_lazy.tracking.spool`, later; here they are to fail soon.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

P = ParamSpec("P")
T = TypeVar("T")
METRICS_PER_CALL = 1000
CONNECT_SECONDS = 5.0
GATEWAY_STATUSES = (408, 429, 502, 503, 504)
"""By which a gateway, or a server that is overloaded, says that a call is to be made again."""
ANSWER_SECONDS = 10.0

URI_VARIABLE = "MLFLOW_TRACKING_URI"
DATABASES = ("sqlite", "postgresql", "postgresql+psycopg")
ARTIFACTS = "mlartifacts"
"""Folder of a local store's artifacts, in the runs folder."""
MOST_RUNS_SEEN = 1000
PARENT_PAGES = {"its table": "table.html", "its report": "report.html"}
"""Artifacts of a parent run, by what their links are called."""


@dataclass(frozen=True)
class TrackedRun:
    """What the store knows of a run. `state` is "complete" only after its final metrics were logged."""

    run_id: str
    state: Literal["complete", "failed", "running"]
    tags: dict[str, str]
    metrics: dict[str, float]
    params: dict[str, str]


class TrackingError(UnfinishedError):
    """MLflow did not take a call. What was to be logged can be logged later."""

    def __init__(self, message: str, reachable: bool) -> None:
        super().__init__(message)
        self.reachable = reachable
        """Whether it answered: then it refused the call, and is likely to do so again."""


@dataclass(frozen=True)
class MetricRecord:
    """Metrics of one step, with the time at which they were measured: logging them twice changes nothing."""

    step: int
    milliseconds: int
    """Since the epoch."""
    metrics: Mapping[str, float]


def _translate_errors(method: Callable[P, T]) -> Callable[P, T]:
    """Turn MLflow's many ways to fail into TrackingError."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(*args, **kwargs)
        except (MlflowException, RequestException, OSError) as error:
            raise TrackingError(one_line(error), _is_refusal(error)) from error

    return call


def _is_refusal(error: BaseException) -> bool:
    """Whether the store itself said no.

    That something listens at its address says little: a tunnel or a gateway does so too while the server is away, and
    one that is overloaded accepts connections for long.
    """
    for cause in iter_causes(error):
        if isinstance(cause, HTTPError):
            return cause.response.status_code not in GATEWAY_STATUSES
        if isinstance(cause, RetryError):
            return not any(f"too many {status} error" in str(cause) for status in GATEWAY_STATUSES)
        if isinstance(cause, RequestException):
            return False
        if isinstance(cause, OperationalError):
            return isinstance(cause.orig, sqlite3.Error)
    return True


def find_connection_error(uri: str) -> str | None:
    """Why nothing listens at a server's address, or None if something does, or if it is no address."""
    address = urlsplit(uri)
    if address.scheme not in ("http", "https"):
        return None
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), CONNECT_SECONDS).close()
    except OSError as error:
        return str(error)
    except ValueError:
        return "its port is no number"  # what Python says of it may be part of a password
    return None


def check_store(uri: str) -> None:
    """Raise ValueError, in one line, where the tracking store cannot be used. Nothing is created."""
    named = f"{URI_VARIABLE}={redact_url(uri)}"
    if why := find_connection_error(uri):
        raise ValueError(f"{named}: does not answer ({why}); start the server, or unset the variable")
    scheme, _, rest = uri.partition("://")
    if scheme in ("http", "https"):
        if why := _find_server_error(uri):
            raise ValueError(f"{named}: is no MLflow server, or does not serve us ({why}); name another, or unset it")
        return
    if scheme not in DATABASES or rest in ("", "/", "/:memory:"):
        raise ValueError(
            f"{named}: must be http://HOST:PORT, sqlite:///FILE or postgresql://...; or unset the variable"
        )
    check_sqlite(named, uri)
    query_database(
        URI_VARIABLE if os.environ.get(URI_VARIABLE) else "MLflow's database", uri, "experiments", lambda _: None
    )
    if (file := sqlite_file(uri)) is not None:
        option = URI_VARIABLE if os.environ.get(URI_VARIABLE) else "--runs"
        if quote_path(file) != str(file):  # it would make a folder of the quoted name
            raise ValueError(
                f"{option} {str(file.parent)!r}: MLflow keeps no database where a path has a ? or a %; name another "
                f"folder, or set {URI_VARIABLE} to a server"
            )
        check_writable_folder(option, file.parent)


def _find_server_error(uri: str) -> str | None:
    """Why a server does not answer as MLflow's does, within seconds; None if it does."""

    def ask() -> None:
        # An experiment is always there, the deleted ones included; some other server may answer {} to everything.
        if not make_client(uri).search_experiments(ViewType.ALL, max_results=1):
            raise MlflowException("it has no experiments, not even MLflow's own")

    try:
        call_with_timeout(ANSWER_SECONDS, ask)
    except Exception as error:  # MLflow's client raises almost anything at what it does not expect
        return one_line(error)
    return None


def default_uri(runs: Path) -> str:
    """The tracking store: `MLFLOW_TRACKING_URI` where it is set, else sqlite in the runs folder."""
    return os.environ.get(URI_VARIABLE) or sqlite_url(runs / "mlflow.db")


def _set_tracking_uri(uri: str) -> None:
    """Make `uri` MLflow's store without exporting it: `default_uri` would take it for the user's own wish."""
    before = os.environ.get(URI_VARIABLE)
    mlflow.set_tracking_uri(uri)
    if before is None:
        os.environ.pop(URI_VARIABLE, None)
    else:
        os.environ[URI_VARIABLE] = before


def make_client(uri: str) -> MlflowClient:
    """MLflow's client of a store, which becomes that of this process.

    A server's password becomes a variable: MLflow names the address in its errors, and keeps it where it pleases.
    """
    address = urlsplit(uri)
    if address.scheme in ("http", "https") and address.password:
        os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(address.username or "")
        os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(address.password)
        uri = strip_user(uri)
    if (file := sqlite_file(uri)) is not None and has_content(file):
        relocate_artifacts(file, ARTIFACTS)
    _set_tracking_uri(uri)
    return MlflowClient(uri)


def _create_database(file: Path) -> None:
    """MLflow's database, whole or not at all: one whose creation was killed half-way could never be opened again."""
    with create_sqlite_file(file) as unfinished:
        store = SqlAlchemyStore(sqlite_url(unfinished), DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
        store.engine.dispose()


class Tracker:
    """One MLflow experiment, found or created when it is first needed. Methods raise TrackingError.

    `uri` is the store's as it may be shown, `secret_uri` has its password.
    """

    def __init__(self, uri: str, runs: Path, experiment: str) -> None:
        self.secret_uri, self.uri, self.runs, self.experiment = uri, redact_url(uri), runs, experiment
        file = sqlite_file(uri)
        # Two processes must not create the database at once.
        with FileLock(f"{file}.lock") if file else nullcontext():
            if file is not None and not has_content(file):
                _create_database(file)
            self.client = make_client(uri)

    @functools.cached_property
    def experiment_id(self) -> str:
        """MLflow's number of the experiment."""
        found = self.client.get_experiment_by_name(self.experiment)
        if found is None:
            # A local database would put artifacts under the current folder; a server decides for itself.
            local = sqlite_file(self.uri) is not None
            location = (self.runs / ARTIFACTS / self.experiment).resolve().as_uri() if local else None
            return self.client.create_experiment(self.experiment, artifact_location=location)
        if found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        return found.experiment_id

    @_translate_errors
    def create_run(self, name: str, tags: Mapping[str, str]) -> str:
        """A new run, not described yet; its id."""
        return self.client.create_run(self.experiment_id, run_name=name, tags=dict(tags)).info.run_id

    def start_run(
        self,
        name: str,
        tags: Mapping[str, str],
        params: Mapping[str, str],
        config: Mapping[str, Any],
        parent_id: str | None = None,
    ) -> str:
        """A new run with its whole config; its id."""
        linked = {"mlflow.parentRunId": parent_id} if parent_id else {}
        run_id = self.create_run(name, {**tags, **linked})
        self.log_config(run_id, params, config)
        return run_id

    @_translate_errors
    def log_config(self, run_id: str, params: Mapping[str, str], config: Mapping[str, Any]) -> None:
        """Log a run's whole config as params and as an artifact; doing it again changes nothing."""
        every = {path: str(value) for path, value in flatten(config).items()} | dict(params)
        self.client.log_batch(run_id, params=[Param(key, value) for key, value in every.items()])
        self._log_artifact(run_id, "config.yaml", yaml.safe_dump(dict(config)).encode())

    @_translate_errors
    def log(self, run_id: str, lines: Sequence[MetricRecord]) -> None:
        """Log metrics of several steps. What is there already stays as it is."""
        points = [
            Metric(name, value, line.milliseconds, line.step) for line in lines for name, value in line.metrics.items()
        ]
        for start in range(0, len(points), METRICS_PER_CALL):
            self.client.log_batch(run_id, metrics=points[start : start + METRICS_PER_CALL])

    @_translate_errors
    def finish(self, run_id: str, metrics: Mapping[str, float], tags: Mapping[str, str], step: int) -> None:
        """Log final metrics and mark the run complete. Doing it again changes nothing."""
        run = self.client.get_run(run_id)
        if "reason" in run.data.tags:  # of an attempt that ended early
            self.client.delete_tag(run_id, "reason")
        self.client.log_batch(
            run_id,
            metrics=[Metric(name, value, run.info.start_time, step) for name, value in metrics.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
        self.client.set_tag(run_id, "state", "complete")
        self.client.set_terminated(run_id, "FINISHED")

    @_translate_errors
    def log_after_end(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """Log what was measured of a run after its end; doing it again replaces what is shown."""
        self.client.log_batch(
            run_id, metrics=[Metric(name, x, _epoch_milliseconds(), 0) for name, x in metrics.items()]
        )

    @_translate_errors
    def tag(self, run_id: str, name: str, text: str) -> None:
        """Set a tag of a run."""
        self.client.set_tag(run_id, name, text)

    @_translate_errors
    def fail(self, run_id: str, reason: str, status: Literal["FAILED", "KILLED"] = "FAILED") -> None:
        """Mark a run failed (KILLED: interrupted) with its reason."""
        self.client.set_tag(run_id, "state", "failed")
        self.client.set_tag(run_id, "reason", reason)
        self.client.set_terminated(run_id, status)

    @_translate_errors
    def prune(self, run_id: str, reason: str) -> None:
        """Mark a run ended early by a search, and why."""
        for name, value in (("state", "pruned"), ("optuna.state", "PRUNED"), ("reason", reason)):
            self.client.set_tag(run_id, name, value)
        self.client.set_terminated(run_id, "KILLED")

    @_translate_errors
    def find(self, tags: Mapping[str, str], deleted: bool = False) -> list[TrackedRun]:
        """All runs with these tags, oldest first; deleted: those that were retired too."""
        query = " AND ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        view = ViewType.ALL if deleted else ViewType.ACTIVE_ONLY
        found: list[Run] = []
        token: str | None = None
        while True:
            page = self.client.search_runs(
                [self.experiment_id], query, view, order_by=["start_time ASC"], max_results=1000, page_token=token
            )
            found += page
            token = page.token
            if not token:
                return [_make_tracked_run(run) for run in found]

    @_translate_errors
    def has_run(self, run_id: str) -> bool:
        """Whether a run is there, and not retired."""
        try:
            return self.client.get_run(run_id).info.lifecycle_stage == LifecycleStage.ACTIVE
        except MlflowException as error:
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return False
            raise

    @_translate_errors
    def find_children(self, parent_id: str) -> list[TrackedRun]:
        """The runs below a parent run, oldest first."""
        return self.find({"mlflow.parentRunId": parent_id})

    @_translate_errors
    def log_text(self, run_id: str, text: str, name: str) -> None:
        """Keep a text as an artifact of a run."""
        self._log_artifact(run_id, name, text.encode())

    @_translate_errors
    def log_files(self, run_id: str, files: Sequence[Path]) -> None:
        """Keep files as artifacts of a run."""
        for file in files:
            self._log_artifact(run_id, file.name, file.read_bytes())

    def _log_artifact(self, run_id: str, name: str, content: bytes) -> None:
        where = self.client.get_run(run_id).info.artifact_uri
        if where.startswith("file:"):
            # MLflow's own copy into a folder can be cut off half-way, and then passes for the artifact.
            folder = Path(local_file_uri_to_path(where))
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, lambda file: file.write(content))
            return
        with TemporaryDirectory() as scratch:
            file = Path(scratch, name)
            file.write_bytes(content)
            self.client.log_artifact(run_id, str(file))

    @_translate_errors
    def read_text(self, run_id: str, name: str) -> str:
        """A text artifact of a run."""
        with TemporaryDirectory() as folder:
            return Path(self.client.download_artifacts(run_id, name, folder)).read_text()

    @_translate_errors
    def read_bytes(self, run_id: str, name: str) -> bytes | None:
        """An artifact of a run, or None where the run has no such artifact."""
        if name not in {artifact.path for artifact in self.client.list_artifacts(run_id)}:
            return None
        with TemporaryDirectory() as folder:
            return Path(self.client.download_artifacts(run_id, name, folder)).read_bytes()

    @_translate_errors
    def read_history(self, run_id: str, names: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
        """Steps and values of metrics of a run, in order; what it never logged is left out."""
        found = {}
        for name in names:
            if points := self.client.get_metric_history(run_id, name):
                found[name] = sorted((point.step, point.value) for point in points)
        return found

    @_translate_errors
    def set_running(self, run_id: str) -> None:
        """Set a run running, again if it had ended."""
        self.client.update_run(run_id, status="RUNNING")

    @_translate_errors
    def set_ended(self, run_id: str, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Set a run ended."""
        self.client.set_terminated(run_id, status)

    @_translate_errors
    def was_cut_off(self, run_id: str) -> bool:
        """Whether a run did not come to its own end: one that did is FINISHED, or FAILED where a cell has."""
        return self.client.get_run(run_id).info.status in ("RUNNING", "KILLED")

    @_translate_errors
    def save_views(
        self,
        axes: Sequence[str],
        columns: Sequence[str],
        main: Sequence[str] | None = None,
        rows: Sequence[str] | None = None,
    ) -> None:
        """Save the experiment's views, as its cells are now; of very many, the newest are looked at.

        axes: params in which cells differ. columns: metrics of its table. main: those of them that charts show, the
        one that all is held against first; None for all. rows: the variants, the baseline first, once no more cells
        are to come: each is given a colour.
        """
        runs = self._find_newest("cell")
        cells = [CellRun(run.data.tags["variant"], run.data.params, run.data.metrics) for run in runs]
        groups = None
        if rows is not None and len(runs) < MOST_RUNS_SEEN:
            normalisers = {cell.variant: get_normaliser_name(cell.params) for cell in cells}
            chosen = assign_colours(dict.fromkeys(rows, "") | normalisers)
            groups = {row: make_group_name(row, colour) for row, colour in chosen.items()}
            far = find_outlier_rows(cells)
            for run, cell in zip(runs, cells, strict=True):
                row, charted = cell.variant, "no" if cell.variant in far else "yes"
                self._update_tags(run, {COLOUR_TAG: chosen[row], ROW_TAG: groups[row], CHARTED_TAG: charted})
        self._write_views(build_views(axes, columns, columns if main is None else main, cells, groups))

    @_translate_errors
    def save_run_views(self) -> None:
        """Save the views of an experiment whose runs are no cells, as these are now."""
        runs = self._find_newest("run")
        chosen = assign_colours({run.info.run_id: get_normaliser_name(run.data.params) for run in reversed(runs)})
        for run in runs:
            self._update_tags(run, {COLOUR_TAG: chosen[run.info.run_id]})
        self._write_views(
            build_run_views([CellRun(run.info.run_name, run.data.params, run.data.metrics) for run in runs])
        )

    def _find_newest(self, kind: str) -> list[Run]:
        newest = ["start_time DESC"]
        return self.client.search_runs(
            [self.experiment_id], f"tags.kind = '{kind}'", order_by=newest, max_results=MOST_RUNS_SEEN
        )

    def _update_tags(self, run: Run, tags: Mapping[str, str]) -> None:
        new = [RunTag(name, text) for name, text in tags.items() if run.data.tags.get(name) != text]
        if new:
            self.client.log_batch(run.info.run_id, tags=new)

    def _write_views(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for name, state in states.items():
            self.client.set_experiment_tag(self.experiment_id, *encode_view(name, state))

    @_translate_errors
    def retire(self, run_id: str) -> None:
        """Move a run and its children to MLflow's deleted runs, from where they can be restored; the parent first.

        A parent that is there is so with all its children, also where this was cut off.
        """
        children = self.find_children(run_id)
        self.client.delete_run(run_id)
        for child in children:
            self.client.delete_run(child.run_id)


def _epoch_milliseconds() -> int:
    """In milliseconds since the epoch."""
    return int(1000 * time.time())


def _make_tracked_run(run: Run) -> TrackedRun:
    tags = dict(run.data.tags)
    stated = tags.get("state")
    if stated == "complete":
        state: Literal["complete", "failed", "running"] = "complete"
    else:
        state = "running" if run.info.status == "RUNNING" and stated != "failed" else "failed"
    return TrackedRun(run.info.run_id, state, tags, dict(run.data.metrics), dict(run.data.params))


@dataclass(frozen=True)
class ExperimentLinks:
    """Links into the MLflow pages of one experiment, by what they show."""

    name: str
    pages: dict[str, str]


def find_experiment_links(uri: str, ui_url: str) -> list[ExperimentLinks]:
    """Links to every experiment of a store that holds training runs, the most recently used first."""
    client = make_client(uri)
    links = []
    for experiment in client.search_experiments(order_by=["last_update_time DESC"]):
        number = experiment.experiment_id
        runs = client.search_runs([number], order_by=["start_time DESC"], max_results=1)
        if not runs:
            continue
        pages = {
            label: runs_link(ui_url, number, view)
            for label, view in LINKED_VIEWS.items()
            if TAG_PREFIX + view_id(view) in experiment.tags
        }
        query = "tags.ablation LIKE '%' AND tags.kind != 'cell'"  # an ablation's parent run, or a search's
        for parent in client.search_runs([number], query, order_by=["start_time DESC"], max_results=1):
            kept = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
            pages |= {
                label: run_link(ui_url, number, parent.info.run_id, artifact)
                for label, artifact in PARENT_PAGES.items()
                if artifact in kept
            }
        links.append(ExperimentLinks(experiment.name, pages | {"runs": runs_link(ui_url, number)}))
    return links


def list_experiment_names(uri: str, kind: str | None = None) -> list[str]:
    """Names of all experiments of a store; none where a local store does not exist, which is not created.

    kind: only those that hold a run with this tag.
    """
    if (file := sqlite_file(uri)) is not None and not has_content(file):
        return []
    client = make_client(uri)
    try:
        return [
            experiment.name
            for experiment in client.search_experiments()
            if kind is None or client.search_runs([experiment.experiment_id], f"tags.kind = '{kind}'", max_results=1)
        ]
    except MlflowException as error:
        raise TrackingError(one_line(error), reachable=True) from error
