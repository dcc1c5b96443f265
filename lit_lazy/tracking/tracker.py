"""Tracker: logs runs of one MLflow experiment."""

import functools
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import yaml
from mlflow.entities import LifecycleStage, Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

from lit_lazy.config.serialisation import flatten
from lit_lazy.support.disk import write_atomically
from lit_lazy.support.inside import join_name
from lit_lazy.support.locks import read_id
from lit_lazy.support.secrets import redact_url
from lit_lazy.tracking import views
from lit_lazy.tracking.client import create_artifact_folder, open_artifacts, open_store, translate_errors
from lit_lazy.tracking.store import sqlite_file
from lit_lazy.training.run_folder import MetricRecord

METRICS_PER_CALL = 1000
MOST_RUNS_SEEN = 1000
NOTE = "mlflow.note.content"
"""The tag that MLflow shows as the description of a run or of an experiment."""
BETWEEN = "\n\n"
PARENT = "mlflow.parentRunId"
OWNER, OWNER_ID = "owner", "owner_id"
"""Tag of a training's run, and the file with its value in the runs folder that started it."""


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


@dataclass(frozen=True)
class TrackedRun:
    """A run as MLflow stores it. `state` is "complete" only after its final metrics were logged and it has ended."""

    run_id: str
    state: str
    """Its tag `state`: complete, failed or pruned; "running" while it runs."""
    tags: dict[str, str]
    params: dict[str, str]


@translate_errors
class Tracker:
    """One MLflow experiment, created on first use. Methods raise TrackingError.

    `uri` is the store's address without its password.
    """

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
            location = create_artifact_folder(database, self.experiment) if database else None
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
        self._log_artifact(run_id, "config.yaml", yaml.safe_dump(dict(config)).encode())

    def log(self, run_id: str, lines: Sequence[MetricRecord]) -> None:
        """Log metrics of several steps; points that MLflow already holds stay unchanged."""
        points = [
            Metric(name, value, line.milliseconds, line.step) for line in lines for name, value in line.metrics.items()
        ]
        for start in range(0, len(points), METRICS_PER_CALL):
            self.client.log_batch(run_id, metrics=points[start : start + METRICS_PER_CALL])

    def finish(self, run_id: str, metrics: Mapping[str, float], tags: Mapping[str, str], step: int) -> None:
        """Log final metrics and mark the run complete; idempotent."""
        run = self.client.get_run(run_id)
        if "reason" in run.data.tags:  # from an attempt that ended early
            self.client.delete_tag(run_id, "reason")
        self.client.log_batch(
            run_id,
            metrics=[Metric(name, value, run.info.start_time, step) for name, value in metrics.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
        self.client.set_tag(run_id, "state", "complete")
        self.set_ended(run_id, "FINISHED")

    def log_after_end(self, run_id: str, metrics: Mapping[str, float]) -> None:
        """Log metrics that were measured after a run's end; later values replace earlier ones on MLflow's pages.

        Values that the run has already are not repeated: MLflow would draw them as a curve.
        """
        now, known = int(1000 * time.time()), self.client.get_run(run_id).data.metrics
        new = [Metric(name, value, now, 0) for name, value in metrics.items() if known.get(name) != value]
        if new:
            self.client.log_batch(run_id, metrics=new)

    def tag(self, run_id: str, name: str, text: str) -> None:
        """Set a tag of a run."""
        self.client.set_tag(run_id, name, text)

    def describe(self, run_id: str, paragraphs: Sequence[str], whole: str) -> None:
        """Set the description, in Markdown, of a run and of the experiment. whole: names the file with what is cut."""
        note = join_note(paragraphs, whole)
        self.tag(run_id, NOTE, note)
        self.client.set_experiment_tag(self.experiment_id, NOTE, note)

    def fail(self, run_id: str, reason: str, status: Literal["FAILED", "KILLED"] = "FAILED", **tags: str) -> None:
        """Mark a run as failed, or as interrupted (KILLED), with the reason. tags: further ones, or another `state`."""
        for name, value in {"state": "failed", "reason": reason, **tags}.items():
            self.client.set_tag(run_id, name, value)
        self.client.set_terminated(run_id, status)

    def find(self, tags: Mapping[str, str]) -> list[TrackedRun]:
        """All runs with these tags that are not retired, oldest first."""
        query = " AND ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        found: list[Run] = []
        token: str | None = None
        while True:
            page = self.client.search_runs(
                [self.experiment_id], query, order_by=["start_time ASC"], max_results=1000, page_token=token
            )
            found += page
            token = page.token
            if not token:
                break
        states = {run.info.run_id: run.data.tags.get("state", "failed") for run in found}
        states |= {run.info.run_id: "running" for run in found if run.info.status == "RUNNING"}
        return [TrackedRun(run.info.run_id, states[run.info.run_id], run.data.tags, run.data.params) for run in found]

    def has_run(self, run_id: str) -> bool:
        """Whether a run exists and is not retired."""
        try:
            return self.client.get_run(run_id).info.lifecycle_stage == LifecycleStage.ACTIVE
        except MlflowException as error:
            if error.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                return False
            raise

    def find_own(self, tags: Mapping[str, str]) -> list[TrackedRun]:
        """Those of `find` that this runs folder began: several people may train one configuration with one MLflow.

        Runs of earlier versions do not say. Those in the database of the folder are its own, of others nobody knows.
        """
        owner, database = read_owner(self.runs), sqlite_file(self.uri)
        unsaid = owner if database and database.resolve().parent == self.runs.resolve() else ""
        return [run for run in self.find(tags) if run.tags.get(OWNER, unsaid) == owner]

    def log_text(self, run_id: str, text: str, name: str) -> None:
        """Store a text as an artifact of a run."""
        self._log_artifact(run_id, name, text.encode())

    def log_files(self, run_id: str, files: Sequence[Path]) -> None:
        """Store files as artifacts of a run."""
        for file in files:
            self._log_artifact(run_id, file.name, file.read_bytes())

    def _log_artifact(self, run_id: str, name: str, content: bytes) -> None:
        artifacts = open_artifacts(self.client, self.client.get_run(run_id).info.artifact_uri)
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

    def set_running(self, run_id: str) -> None:
        """Set a run's status to running, also after it has ended."""
        self.client.update_run(run_id, status="RUNNING")

    def set_ended(self, run_id: str, status: Literal["FINISHED", "FAILED", "KILLED"]) -> None:
        """Set the final status of a run; one that has ended so keeps the time of its end."""
        if self.client.get_run(run_id).info.status != status:
            self.client.set_terminated(run_id, status)

    def save_views(
        self, axes: Sequence[str], columns: Sequence[str], main: Sequence[str] | None = None, ended: bool = False
    ) -> None:
        """Save the experiment's views for the newest `MOST_RUNS_SEEN` cells.

        axes: params in which cells differ. columns: metrics of the table. main: the columns with charts, main metric
        first; None for all. ended: whether all cells have ended, so that charts can leave out rows with an outlying
        loss.
        """
        runs = self._find_newest("cell")
        cells = [views.CellRun(run.data.tags["variant"], run.data.params, run.data.metrics) for run in runs]
        charted = ended and len(runs) < MOST_RUNS_SEEN
        if charted:
            far = views.find_outlier_rows(cells)
            for run, cell in zip(runs, cells, strict=True):
                value = "no" if cell.variant in far else "yes"
                if run.data.tags.get(views.CHARTED_TAG) != value:
                    self.client.set_tag(run.info.run_id, views.CHARTED_TAG, value)
        self._write_views(views.build_views(axes, columns, columns if main is None else main, cells, charted))

    def save_run_views(self) -> None:
        """Save the views of a `lit-lazy train` experiment for its newest runs."""
        runs = self._find_newest("run")
        shown = [views.CellRun(run.info.run_name, run.data.params, run.data.metrics) for run in runs]
        self._write_views(views.build_run_views(shown))

    def _find_newest(self, kind: str) -> list[Run]:
        newest = ["start_time DESC"]
        return self.client.search_runs(
            [self.experiment_id], f"tags.kind = '{kind}'", order_by=newest, max_results=MOST_RUNS_SEEN
        )

    def _write_views(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for name, state in states.items():
            self.client.set_experiment_tag(self.experiment_id, *views.encode_view(name, state))

    def remove_experiment(self) -> None:
        """Move the experiment and its runs to MLflow's deleted ones, and free its name for a new experiment."""
        self.client.rename_experiment(self.experiment_id, f"{self.experiment}.removed-{uuid.uuid4().hex[:8]}")
        self.client.delete_experiment(self.experiment_id)

    def retire(self, run_id: str) -> None:
        """Delete a run and its children in MLflow, which can restore them.

        The parent goes first: an active parent then has all its children, even after a kill in between.
        """
        children = self.find({PARENT: run_id})
        self.client.delete_run(run_id)
        for child in children:
            self.client.delete_run(child.run_id)


def read_owner(runs: Path) -> str:
    """The random id of a runs folder."""
    return read_id(runs / OWNER_ID)
