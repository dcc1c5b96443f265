"""A run of MLflow that shows a run folder: a cell of a grid, or the training of `lit-lazy train`."""

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from lit_lazy.support.process import repeat_in_background
from lit_lazy.tracking.store import read_run_id, write_run_address
from lit_lazy.tracking.tracker import OWNER, PARENT, Tracker, read_owner
from lit_lazy.training.result import DIAGNOSTICS, METRICS, RunResult
from lit_lazy.training.run_folder import read_lines

SEND_SECONDS = 5.0

log = logging.getLogger("lit_lazy.tracking.active_run")


class ActiveRun:
    """A run of MLflow that shows a run folder: its metrics while it is trained, and its result.

    Training never waits for MLflow, and an outage loses nothing: whoever sends next, now or later, sends what is
    missing.
    """

    def __init__(
        self,
        tracker: Tracker,
        folder: Path,
        name: str,
        tags: Mapping[str, str],
        params: Mapping[str, str],
        config: Mapping[str, Any],
        parent_id: str | None = None,
    ) -> None:
        """tags: include `cell` and `kind`. params: logged in addition to the config's fields by dotted path."""
        self.tracker, self.folder, self.name = tracker, folder, name
        self.tags, self.params, self.config, self.parent_id = tags, params, config, parent_id
        self._run_id: str | None = None
        self._sent = 0
        self._set_running = False

    def get_run_id(self) -> str:
        """The id of the MLflow run: that of the folder, or of the same cell, or of a new one. Raises TrackingError."""
        if self._run_id is None:
            begun = read_run_id(self.folder)
            run_id = begun if begun and self.tracker.has_run(begun) else self._find_or_create_run()
            self.tracker.log_config(run_id, self.params, self.config)
            self._run_id = run_id
        return self._run_id

    def _find_or_create_run(self) -> str:
        """Take over the run of the same cell, or create one; retires one's own others, which would hold its curves.

        Of a training, a run that was begun from another folder is retired too: its metrics have other times.
        """
        same = {"cell": self.tags["cell"], "kind": self.tags["kind"]}
        if self.parent_id:
            mark = {PARENT: self.parent_id}
            begun, *others = self.tracker.find({**same, **mark}) or [None]
        else:
            mark = {OWNER: read_owner(self.tracker.runs)}
            begun, others = None, self.tracker.find_own(same)
        for other in others:
            assert other is not None
            self.tracker.retire(other.run_id)
        run_id = begun.run_id if begun else self.tracker.create_run(self.name, {**self.tags, **mark})
        self.folder.mkdir(parents=True, exist_ok=True)  # a run may fail before it creates its folder
        write_run_address(self.folder, run_id, self.tracker.experiment_id)
        return run_id

    def send(self) -> None:
        """Send the metrics that were not sent yet. Raises TrackingError."""
        run_id = self.get_run_id()
        if not self._set_running:
            self.tracker.set_running(run_id)
            self._set_running = True
        lines = read_lines(self.folder / METRICS)
        if len(lines) < self._sent:  # damaged ones were removed
            self._sent = 0
        self.tracker.log(run_id, lines[self._sent :])
        self._sent = len(lines)

    def send_in_background(self) -> AbstractContextManager[object]:
        """Send every few seconds from a thread, also the views of the experiment."""

        def send(ends: bool) -> None:
            if ends:  # `finish` or `fail` follows
                return
            shown = self._set_running
            self.send()
            if not shown:
                self.tracker.save_run_views()

        lost = f"metrics are kept in {self.folder / METRICS}, MLflow lacks them"
        return repeat_in_background(send, SEND_SECONDS, log, lost)

    def finish(self, result: RunResult) -> None:
        """Send everything and mark the MLflow run complete; idempotent. Raises TrackingError."""
        self._set_running = True  # a run that is complete already must not be set to running again
        self.send()
        if (kept := self.folder / DIAGNOSTICS).exists():
            self.tracker.log_files(self.get_run_id(), [kept])
        timings = {f"time/{name}": value for name, value in result.timings.items()}
        execution = ", ".join(f"{name} {value}" for name, value in sorted(result.execution.items()))
        tags = {**result.labels, "git_sha": result.environment["git_sha"], "environment": result.made_in}
        tags |= {k: v for k, v in {"taken_from": result.taken_from, "execution": execution}.items() if v}
        steps = result.config["train"]["steps"]
        self.tracker.finish(self.get_run_id(), {**result.metrics, **timings}, tags, step=steps)

    def fail(self, reason: str, status: Literal["FAILED", "KILLED"]) -> None:
        """Mark the MLflow run as failed, or as interrupted (KILLED). Raises TrackingError."""
        self.send()
        self.tracker.fail(self.get_run_id(), reason, status)
        self._set_running = False
