"""MLflow's client: the runs of one experiment, which show run folders, its artifacts and views, and one-line errors.

A local store has its artifacts in a folder beside its database, by whatever path that is reached.
"""

import logging
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import yaml
from mlflow.entities import Metric, Param, Run, RunData, RunTag
from mlflow.exceptions import MlflowException
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking import MlflowClient
from mlflow.utils import get_results_from_paginated_fn
from mlflow.utils.validation import MAX_TAG_VAL_LENGTH
from requests.exceptions import RequestException

from lit_lazy.config.serialisation import flatten
from lit_lazy.support.disk import describe_failed_write, write_atomically
from lit_lazy.support.error_messages import one_line
from lit_lazy.support.locks import make_file_lock
from lit_lazy.support.names_to_paths import join_name
from lit_lazy.support.secrets import strip_user
from lit_lazy.tracking import views
from lit_lazy.tracking.store_address import (
    ARTIFACTS,
    INTERRUPTED,
    NOTE,
    PARENT,
    End,
    TrackingError,
    read_run_address,
    sqlite_file,
    sqlite_url,
    write_run_address,
)
from lit_lazy.training.run_folder import DIAGNOSTICS, METRICS, MetricRecord, RunResult, read_lines

# MLflow logs every database that it creates, prints the traceback of an error that it also raises, and triggers a
# deprecation warning.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
logging.getLogger("mlflow.store.db.utils").addFilter(lambda record: record.exc_info is None)
warnings.filterwarnings("ignore", message=".*``noload`` loader strategy is deprecated.*")

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# Calls should fail soon: they are repeated later.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

OF_NO_EXPERIMENT = "mlflow-artifacts:/"
"""Artifact location of MLflow's own first experiment: by default the working folder, in a statement without escapes."""
MOST_RUNS_SEEN = 1000
BETWEEN = "\n\n"
IDENTITY = "kind", "cell", "grid", PARENT
"""Tags by which the run of a run folder is found: of a training, its folder's id; of a cell, the grid's run."""

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
    for name, method in [*vars(cls).items()]:
        if callable(method) and not name.startswith("_"):
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
            for left in file.parent.glob(f"{escape(unfinished.name)}*"):  # with its journal
                left.unlink()
            unfinished.touch()  # sqlite's own mode would not let a group write, whatever the umask
            SqlAlchemyStore(sqlite_url(unfinished), OF_NO_EXPERIMENT).engine.dispose()
            unfinished.replace(file)
        return make_client(uri)


def _is_missing(file: Path) -> bool:
    """Whether a local database is missing or empty, which sqlite treats alike."""
    return not (file.exists() and file.stat().st_size)


@_translate_errors()
def list_experiment_names(uri: str) -> list[str]:
    """Names of all experiments of a store; none if a local store does not exist, which is not created."""
    missing = (file := sqlite_file(uri)) is not None and _is_missing(file)
    return [] if missing else [experiment.name for experiment in make_client(uri).search_experiments()]


def locate_artifacts(client: MlflowClient, run: Run) -> Path | None:
    """The folder with the artifacts of a run in a local store: beside the database, wherever MLflow says that it is.

    None for a server's. Raises ValueError if the name of its experiment is a path.
    """
    if (database := sqlite_file(client.tracking_uri)) is None:
        return None
    experiment = client.get_experiment(run.info.experiment_id).name
    return join_name(join_name(database.resolve().parent / ARTIFACTS, experiment), run.info.run_id) / "artifacts"


def list_artifacts(client: MlflowClient, run: Run) -> list[str]:
    """Names of the artifacts of a run."""
    if (folder := locate_artifacts(client, run)) is None:
        return [artifact.path for artifact in client.list_artifacts(run.info.run_id)]
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


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

    def __init__(self, uri: str, experiment: str) -> None:
        self.client, self.experiment = open_store(uri), experiment

    @cached_property
    def experiment_id(self) -> str:
        """MLflow's id of the experiment."""
        found = self.client.get_experiment_by_name(self.experiment)
        if found is None:
            # With a local database MLflow would put artifacts under the current folder; a server chooses the location.
            database = sqlite_file(self.client.tracking_uri)
            folder = join_name(database.resolve().parent / ARTIFACTS, self.experiment) if database else None
            return self.client.create_experiment(self.experiment, folder.as_uri() if folder else None)
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

    def update(
        self,
        run_id: str,
        status: Literal["RUNNING", "FINISHED", "FAILED", "KILLED", None] = None,
        *,
        params: Mapping[str, str] = {},
        metrics: Mapping[str, float] = {},
        step: int = 0,
        tags: Mapping[str, str] = {},
        files: Mapping[str, bytes] = {},
    ) -> None:
        """Give a run what it lacks, its status last, so that one that has ended has everything; idempotent.

        status: None to leave it. params: a run keeps those that it has. metrics: values at `step`; one that the run has
        is not repeated, which MLflow would draw as a curve. files: contents of artifacts by name.
        """
        run, now = self.client.get_run(run_id), int(1000 * time.time())
        known = run.data
        for name, content in files.items():
            self._store(run, name, content)
        self.client.log_batch(
            run_id,
            [Metric(name, value, now, step) for name, value in metrics.items() if known.metrics.get(name) != value],
            [Param(name, value) for name, value in params.items() if name not in known.params],
        )
        self.client.log_batch(run_id, tags=[RunTag(name, text) for name, text in tags.items()])
        if status == "FINISHED" and "reason" in known.tags:  # from an attempt that ended early
            self.client.delete_tag(run_id, "reason")
        if status not in (None, run.info.status):  # one that has ended so keeps the time of its end
            set_status = self.client.update_run if status == "RUNNING" else self.client.set_terminated
            set_status(run_id, status)

    def _store(self, run: Run, name: str, content: bytes) -> None:
        if (folder := locate_artifacts(self.client, run)) is not None:
            # MLflow's own copy is not atomic: a partial file would pass for the artifact.
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, lambda file: file.write(content))
            return
        with TemporaryDirectory() as scratch:
            file = Path(scratch, name)
            file.write_bytes(content)
            self.client.log_artifact(run.info.run_id, str(file))

    def log_config(self, run_id: str, params: Mapping[str, str], config: Mapping[str, Any]) -> None:
        """Log a run's config as an artifact and as params, with further params."""
        every = {path: str(value) for path, value in flatten(config).items()} | dict(params)
        self.update(run_id, params=every, files={"config.yaml": yaml.safe_dump(dict(config)).encode()})

    def log(self, run_id: str, lines: Sequence[MetricRecord]) -> None:
        """Log metrics of several steps; points that MLflow already holds stay unchanged."""
        points = [Metric(name, value, at.milliseconds, at.step) for at in lines for name, value in at.metrics.items()]
        self.client.log_batch(run_id, points)

    def describe(self, run_id: str, paragraphs: Sequence[str], whole: str) -> None:
        """Set the description, in Markdown, of a run and of the experiment. whole: names the file with what is cut."""
        note = join_note(paragraphs, whole)
        self.update(run_id, tags={NOTE: note})
        self.client.set_experiment_tag(self.experiment_id, NOTE, note)

    def find(self, tags: Mapping[str, str]) -> list[Run]:
        """All runs with these tags that are not deleted, oldest first."""
        query = " AND ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        search = partial(self.client.search_runs, [self.experiment_id], query, order_by=["start_time ASC"])
        return get_results_from_paginated_fn(lambda size, token: search(max_results=size, page_token=token), 1000)

    def save_views(self, kind: str, build: Callable[[Sequence[RunData]], Mapping[str, views.State]]) -> None:
        """Save the views that `build` makes of the newest `MOST_RUNS_SEEN` runs of a kind, as in views.py."""
        newest = self.find({"kind": kind})[::-1][:MOST_RUNS_SEEN]
        for name, state in build([run.data for run in newest]).items():
            self.client.set_experiment_tag(self.experiment_id, *views.encode_view(name, state))

    def mark_outliers(self) -> bool:
        """Tag the cells, all of which have ended, for charts without rows with an outlying loss.

        Returns whether all cells have the tag: too many stay without it.
        """
        cells = self.find({"kind": "cell"})
        if len(cells) >= MOST_RUNS_SEEN:
            return False
        far = views.find_outlier_rows([cell.data for cell in cells])
        for cell in cells:
            value = "no" if cell.data.tags["variant"] in far else "yes"
            if cell.data.tags.get(views.CHARTED_TAG) != value:
                self.client.set_tag(cell.info.run_id, views.CHARTED_TAG, value)
        return True

    def remove_experiment(self) -> None:
        """Move the experiment and its runs to MLflow's deleted ones, and free its name for a new experiment."""
        self.client.rename_experiment(self.experiment_id, f"{self.experiment}.removed-{uuid.uuid4().hex[:8]}")
        self.client.delete_experiment(self.experiment_id)

    def delete_run(self, run_id: str) -> None:
        """Delete a run and its children in MLflow, which can restore them.

        The children go first: after a kill in between, the parent is there to be found again.
        """
        for run in (*(child.info.run_id for child in self.find({PARENT: run_id})), run_id):
            self.client.delete_run(run)


@dataclass(eq=False)
class MirroredRun:
    """A run of MLflow that shows a run folder: a cell of a grid, or the training of `lit-lazy train`.

    Training never waits for MLflow, and an outage loses nothing: whoever sends next, now or later, sends what is
    missing.
    """

    tracker: Tracker
    folder: Path
    name: str
    tags: Mapping[str, str]
    """Include `cell` and `kind`, and PARENT of a cell or `grid` of a training."""
    params: Mapping[str, str]
    """Logged in addition to the config's fields."""
    config: Mapping[str, Any]
    _run_id: str = ""
    _sent: int = 0

    def _open(self) -> str:
        """The id of the MLflow run, which is created if MLflow has none.

        Several people may train one configuration in one experiment, so that a training has the run of its folder's id;
        of an earlier version, that which its folder names.
        """
        if not self._run_id:
            tracker, (named, _) = self.tracker, read_run_address(self.folder)
            mine = tracker.find({name: self.tags[name] for name in IDENTITY if name in self.tags})
            if not mine and named and PARENT not in self.tags:  # of an earlier version
                mine = [run for run in tracker.find({"cell": self.tags["cell"]}) if run.info.run_id == named]
            run_id = mine[0].info.run_id if mine else tracker.create_run(self.name, self.tags)
            self.folder.mkdir(parents=True, exist_ok=True)  # a run may fail before it creates its folder
            write_run_address(self.folder, run_id, tracker.experiment_id)
            tracker.log_config(run_id, self.params, self.config)
            self._run_id = run_id
        return self._run_id

    def sync(self, end: End | RunResult | None) -> None:
        """Send what MLflow lacks: the run's metrics so far, and its result or how else it ended; idempotent.

        end: None while it is trained. Raises TrackingError.
        """
        tracker, run_id = self.tracker, self._open()
        lines = read_lines(self.folder / METRICS)
        if len(lines) < self._sent:  # damaged ones were removed
            self._sent = 0
        tracker.log(run_id, lines[self._sent :])
        self._sent = len(lines)
        if end is None:
            tracker.update(run_id, "RUNNING")
        elif isinstance(end, RunResult):
            self._finish(run_id, end)
        else:
            trial = {"optuna.state": "PRUNED"} if end.state == "pruned" else {}
            status = "KILLED" if trial or end == INTERRUPTED else "FAILED"
            tracker.update(run_id, status, tags={"state": end.state, "reason": end.reason, **trial})

    def _finish(self, run_id: str, result: RunResult) -> None:
        arrays = self.folder / DIAGNOSTICS
        execution = ", ".join(f"{name} {value}" for name, value in sorted(result.execution.items()))
        optional = {"taken_from": result.taken_from, "execution": execution}
        tags = {**result.labels, "git_sha": result.environment["git_sha"], "environment": result.made_in}
        tags |= {name: text for name, text in optional.items() if text} | {"state": "complete"}
        self.tracker.update(
            run_id,
            "FINISHED",
            metrics=result.metrics | {f"time/{name}": value for name, value in result.timings.items()},
            step=result.config["train"]["steps"],
            tags=tags,
            files={arrays.name: arrays.read_bytes()} if arrays.exists() else {},
        )
