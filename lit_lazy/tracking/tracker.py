"""MLflow's client: the runs of one experiment, their artifacts and saved views, and errors in one line.

A local store has its artifacts in a folder beside its database, by whatever path that is reached.
"""

import functools
import inspect
import logging
import os
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import yaml
from mlflow.entities import Metric, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient
from mlflow.utils.validation import MAX_TAG_VAL_LENGTH
from requests.exceptions import RequestException

from lit_lazy.config.serialisation import flatten
from lit_lazy.support.disk import describe_failed_write, write_atomically
from lit_lazy.support.errors import one_line
from lit_lazy.support.locks import make_file_lock
from lit_lazy.support.named_files import join_name
from lit_lazy.support.secrets import redact_url, strip_user
from lit_lazy.tracking import views
from lit_lazy.tracking.store import ARTIFACTS, NOTE, PARENT, TrackingError, sqlite_file, sqlite_url
from lit_lazy.training.run_folder import MetricRecord

# MLflow logs every database that it creates, prints the traceback of an error that it also raises, and triggers a
# deprecation warning.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
logging.getLogger("mlflow.store.db.utils").addFilter(lambda record: record.exc_info is None)
warnings.filterwarnings("ignore", message=".*``noload`` loader strategy is deprecated.*")

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# Calls should fail soon: they are repeated later.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

METRICS_PER_CALL = 1000
MOST_RUNS_SEEN = 1000
BETWEEN = "\n\n"

T = TypeVar("T")


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise TrackingError for every kind of MLflow failure, in a block or as a decorator."""
    try:
        yield
    except (MlflowException, RequestException, OSError) as error:
        raise TrackingError(describe_failed_write(error) or one_line(error)) from error


def _translate_all(cls: type[T]) -> type[T]:
    """Decorate the public methods of a class."""
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_"):
            setattr(cls, name, _translate_errors()(method))
    return cls


def make_client(uri: str) -> MlflowClient:
    """A client of an existing store.

    Moves a server's password into environment variables: MLflow shows the address in errors and stores it.
    """
    address = urlsplit(uri)
    if address.scheme in ("http", "https") and address.password:
        os.environ["MLFLOW_TRACKING_USERNAME"] = unquote(address.username or "")
        os.environ["MLFLOW_TRACKING_PASSWORD"] = unquote(address.password)
        uri = strip_user(uri)
    return MlflowClient(uri)


def open_store(uri: str) -> MlflowClient:
    """A client of the store; creates a local database that is missing."""
    file = sqlite_file(uri)
    # Two processes must not create the database at once.
    with make_file_lock(file.with_name(f"{file.name}.lock")) if file else nullcontext():
        if file is not None and _is_missing(file):
            # Atomically: MLflow cannot reopen a database whose creation was killed half-way.
            unfinished = file.with_name(f"{file.name}.unfinished")
            for left in (unfinished, unfinished.with_name(f"{unfinished.name}-journal")):
                left.unlink(missing_ok=True)
            unfinished.touch()  # sqlite's own mode would not let a group write, whatever the umask
            SqlAlchemyStore(sqlite_url(unfinished), DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH).engine.dispose()
            unfinished.replace(file)
        return make_client(uri)


def _is_missing(file: Path) -> bool:
    """Whether a local database is missing or empty, which sqlite treats alike."""
    return not (file.exists() and file.stat().st_size)


def search_any_experiment(uri: str) -> None:
    """Raise an exception unless an MLflow server answers; its client raises many types for unexpected answers."""
    # MLflow always has an experiment, if only a deleted one; other servers may answer {} to every request.
    if not make_client(uri).search_experiments(ViewType.ALL, max_results=1):
        raise MlflowException("it has no experiments, not even MLflow's own")


@_translate_errors()
def list_experiment_names(uri: str) -> list[str]:
    """Names of all experiments of a store; none if a local store does not exist, which is not created."""
    missing = (file := sqlite_file(uri)) is not None and _is_missing(file)
    return [] if missing else [experiment.name for experiment in make_client(uri).search_experiments()]


def open_artifacts(client: MlflowClient, run: Run) -> ArtifactRepository:
    """The artifacts of a run. In a local store they lie beside the database, wherever MLflow says that they are."""
    if (database := sqlite_file(client.tracking_uri)) is None:
        return get_artifact_repository(run.info.artifact_uri, tracking_uri=client.tracking_uri)
    experiment = client.get_experiment(run.info.experiment_id).name
    folder = join_name(locate_artifacts(database, experiment), run.info.run_id)
    return LocalArtifactRepository((folder / "artifacts").as_uri())


def locate_artifacts(database: Path, experiment: str) -> Path:
    """The folder with the artifacts of an experiment of a local store. Raises ValueError if its name is a path."""
    return join_name(database.resolve().parent / ARTIFACTS, experiment)


def join_note(paragraphs: Sequence[str], whole: str) -> str:
    """The text of a description, at most as long as MLflow stores: it would cut a longer one anywhere.

    The longest paragraphs are shortened first, after a row or a word. whole: names the file with what does not fit.
    """
    shown, share = list(paragraphs), MAX_TAG_VAL_LENGTH // len(paragraphs) - len(BETWEEN)
    while (excess := len(BETWEEN.join(shown)) - MAX_TAG_VAL_LENGTH) > 0:
        at = max(range(len(shown)), key=lambda index: len(shown[index]))
        rest = f" ... (shortened; the whole is in {whole})"
        kept = shown[at][: max(len(shown[at]) - excess, share) - len(rest)]
        end = max(kept.rfind(mark) for mark in (",", ";", "\n"))
        shown[at] = kept[: end if end > 0 else max(kept.rfind(" "), 0) or len(kept)] + rest
    return BETWEEN.join(shown)


@_translate_all
class Tracker:
    """One MLflow experiment, created on first use. Methods raise TrackingError."""

    def __init__(self, uri: str, runs: Path, experiment: str) -> None:
        self.uri, self.runs, self.experiment = redact_url(uri), runs, experiment
        self.client = open_store(uri)

    @property
    def folder(self) -> Path:
        """The experiment's folder of results. Raises a one-line ValueError if its name cannot be that of a folder."""
        return join_name(self.runs, self.experiment)

    @functools.cached_property
    def experiment_id(self) -> str:
        """MLflow's id of the experiment."""
        found = self.client.get_experiment_by_name(self.experiment)
        if found is None:
            # With a local database MLflow would put artifacts under the current folder; a server chooses the location.
            database = sqlite_file(self.uri)
            location = locate_artifacts(database, self.experiment).as_uri() if database else None
            return self.client.create_experiment(self.experiment, artifact_location=location)
        if found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        return found.experiment_id

    def create_run(self, name: str, tags: Mapping[str, str]) -> str:
        """Create a run without params; returns its id."""
        about = {
            # Of the columns User and Source. The system's list of users is not asked: it may be on another machine.
            "mlflow.user": os.environ.get("LOGNAME") or os.environ.get("USER", ""),
            "mlflow.source.name": "lit-lazy",
            "mlflow.source.type": "LOCAL",
            "mlflow.source.git.commit": tags.get("git_sha", ""),
        }
        tags = {name: text for name, text in about.items() if text} | dict(tags)
        return self.client.create_run(self.experiment_id, run_name=name, tags=tags).info.run_id

    def log_config(self, run_id: str, params: Mapping[str, str], config: Mapping[str, Any]) -> None:
        """Log a run's config as an artifact and as params, of which the run keeps those that it has."""
        every = {path: str(value) for path, value in flatten(config).items()} | dict(params)
        known = self.client.get_run(run_id).data.params
        self.client.log_batch(run_id, params=[Param(key, value) for key, value in every.items() if key not in known])
        self.log_artifact(run_id, "config.yaml", yaml.safe_dump(dict(config)).encode())

    def log(self, run_id: str, lines: Sequence[MetricRecord]) -> None:
        """Log metrics of several steps; points that MLflow already holds stay unchanged."""
        points = [Metric(name, value, at.milliseconds, at.step) for at in lines for name, value in at.metrics.items()]
        for start in range(0, len(points), METRICS_PER_CALL):
            self.client.log_batch(run_id, metrics=points[start : start + METRICS_PER_CALL])

    def finish(self, run_id: str, metrics: Mapping[str, float], tags: Mapping[str, str], step: int) -> None:
        """Log final metrics and mark the run complete; idempotent."""
        run = self.client.get_run(run_id)
        if "reason" in run.data.tags:  # from an attempt that ended early
            self.client.delete_tag(run_id, "reason")
        final = [Metric(name, value, run.info.start_time, step) for name, value in metrics.items()]
        self.client.log_batch(run_id, metrics=final, tags=[RunTag(name, value) for name, value in tags.items()])
        self.client.set_tag(run_id, "state", "complete")
        self.set_status(run_id, "FINISHED")

    def fail(self, run_id: str, reason: str, status: Literal["FAILED", "KILLED"], **tags: str) -> None:
        """Mark a run as failed, or as interrupted (KILLED), with the reason. tags: further ones, or another `state`."""
        tags = {"state": "failed", "reason": reason, **tags}
        self.client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
        self.client.set_terminated(run_id, status)

    def log_after_end(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """Log metrics that were measured after a run's end; later values replace earlier ones on MLflow's pages.

        Values that the run has already are not repeated: MLflow would draw them as a curve.
        """
        now, known = int(1000 * time.time()), self.client.get_run(run_id).data.metrics
        new = [Metric(name, value, now, 0) for name, value in metrics.items() if known.get(name) != value]
        self.client.log_batch(run_id, metrics=new)

    def tag(self, run_id: str, name: str, text: str) -> None:
        """Set a tag of a run."""
        self.client.set_tag(run_id, name, text)

    def describe(self, run_id: str, paragraphs: Sequence[str], whole: str) -> None:
        """Set the description, in Markdown, of a run and of the experiment. whole: names the file with what is cut."""
        note = join_note(paragraphs, whole)
        self.client.set_tag(run_id, NOTE, note)
        self.client.set_experiment_tag(self.experiment_id, NOTE, note)

    def find(self, tags: Mapping[str, str]) -> list[views.TrackedRun]:
        """All runs with these tags that are not deleted, oldest first."""
        query = " AND ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        found: list[views.TrackedRun] = []
        token: str | None = ""
        while token is not None:
            page = self.client.search_runs(
                [self.experiment_id], query, order_by=["start_time ASC"], max_results=1000, page_token=token or None
            )
            for run in page:
                state = "running" if run.info.status == "RUNNING" else run.data.tags.get("state", "failed")
                data = run.data
                found.append(views.TrackedRun(run.info.run_id, state, data.tags, data.params, data.metrics))
            token = page.token or None
        return found

    def log_files(self, run_id: str, files: Sequence[Path]) -> None:
        """Store files as artifacts of a run."""
        for file in files:
            self.log_artifact(run_id, file.name, file.read_bytes())

    def log_artifact(self, run_id: str, name: str, content: bytes) -> None:
        """Store an artifact of a run."""
        artifacts = open_artifacts(self.client, self.client.get_run(run_id))
        if isinstance(artifacts, LocalArtifactRepository):
            # MLflow's own copy is not atomic: a partial file would pass for the artifact.
            folder = Path(artifacts.artifact_dir)
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, lambda file: file.write(content))
            return
        with TemporaryDirectory() as scratch:
            file = Path(scratch, name)
            file.write_bytes(content)
            artifacts.log_artifact(str(file))

    def set_status(self, run_id: str, status: Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]) -> None:
        """Set the status of a run, also to running after its end; one that has ended so keeps the time of its end."""
        if self.client.get_run(run_id).info.status != status:
            set_status = self.client.update_run if status == "RUNNING" else self.client.set_terminated
            set_status(run_id, status)

    def save_views(
        self, axes: Sequence[str], columns: Sequence[str], main: Sequence[str] | None = None, ended: bool = False
    ) -> None:
        """Save the experiment's views for the newest `MOST_RUNS_SEEN` cells.

        axes: params in which cells differ. columns: metrics of the table. main: the columns with charts, main metric
        first; None for all. ended: whether all cells have ended, so that charts can leave out rows with an outlying
        loss.
        """
        cells = self._find_newest("cell")
        charted = ended and len(cells) < MOST_RUNS_SEEN
        far = views.find_outlier_rows(cells) if charted else ()
        for cell in cells if charted else ():
            value = "no" if cell.tags["variant"] in far else "yes"
            if cell.tags.get(views.CHARTED_TAG) != value:
                self.client.set_tag(cell.run_id, views.CHARTED_TAG, value)
        self._write_views(views.build_views(axes, columns, columns if main is None else main, cells, charted))

    def save_run_views(self) -> None:
        """Save the views of a `lit-lazy train` experiment for its newest runs."""
        self._write_views(views.build_run_views(self._find_newest("run")))

    def _find_newest(self, kind: str) -> list[views.TrackedRun]:
        return self.find({"kind": kind})[::-1][:MOST_RUNS_SEEN]

    def _write_views(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for name, state in states.items():
            self.client.set_experiment_tag(self.experiment_id, *views.encode_view(name, state))

    def remove_experiment(self) -> None:
        """Move the experiment and its runs to MLflow's deleted ones, and free its name for a new experiment."""
        self.client.rename_experiment(self.experiment_id, f"{self.experiment}.removed-{uuid.uuid4().hex[:8]}")
        self.client.delete_experiment(self.experiment_id)

    def delete_run(self, run_id: str) -> None:
        """Delete a run and its children in MLflow, which can restore them.

        The parent goes first: an active parent then has all its children, even after a kill in between.
        """
        children = self.find({PARENT: run_id})
        for run in (run_id, *(child.run_id for child in children)):
            self.client.delete_run(run)
