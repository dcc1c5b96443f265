"""A run of MLflow that shows a run folder: a cell of a grid, or the training of `lit-lazy train`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_lazy.tracking.store import PARENT, read_run_address, write_run_address
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.result import DIAGNOSTICS, METRICS, RunResult
from lit_lazy.training.run_folder import read_lines


@dataclass(eq=False)
class ActiveRun:
    """A run of MLflow that shows a run folder: its metrics while it is trained, and its result.

    Training never waits for MLflow, and an outage loses nothing: whoever sends next, now or later, sends what is
    missing. Methods raise TrackingError.
    """

    tracker: Tracker
    folder: Path
    name: str
    tags: Mapping[str, str]
    """Include `cell` and `kind`, and PARENT of a cell."""
    params: Mapping[str, str]
    """Logged in addition to the config's fields."""
    config: Mapping[str, Any]
    is_running: bool = False
    """Whether it has set the run to running."""
    _run_id: str = ""
    _sent: int = 0

    def open(self) -> str:
        """The id of the MLflow run, which is created if MLflow has none.

        A grid's cell has the run with its key below the grid's. Several people may train one configuration in one
        experiment, so that a training has the run that its folder names.
        """
        if not self._run_id:
            tracker, (named, _) = self.tracker, read_run_address(self.folder)
            same = tracker.find({name: self.tags[name] for name in ("kind", "cell", PARENT) if name in self.tags})
            mine = (run.run_id for run in same if PARENT in self.tags or run.run_id == named)
            run_id = next(mine, "") or tracker.create_run(self.name, self.tags)
            self.folder.mkdir(parents=True, exist_ok=True)  # a run may fail before it creates its folder
            write_run_address(self.folder, run_id, tracker.experiment_id)
            tracker.log_config(run_id, self.params, self.config)
            self._run_id = run_id
        return self._run_id

    def send(self) -> None:
        """Set the run to running, and send the metrics that were not sent yet."""
        if not self.is_running:
            self.tracker.set_status(self.open(), "RUNNING")
            self.is_running = True
        self._send_lines()

    def _send_lines(self) -> None:
        lines = read_lines(self.folder / METRICS)
        if len(lines) < self._sent:  # damaged ones were removed
            self._sent = 0
        self.tracker.log(self.open(), lines[self._sent :])
        self._sent = len(lines)

    def finish(self, result: RunResult) -> None:
        """Send everything and mark the MLflow run complete; idempotent."""
        self._send_lines()
        if (kept := self.folder / DIAGNOSTICS).exists():
            self.tracker.log_files(self.open(), [kept])
        timings = {f"time/{name}": value for name, value in result.timings.items()}
        execution = ", ".join(f"{name} {value}" for name, value in sorted(result.execution.items()))
        tags = {**result.labels, "git_sha": result.environment["git_sha"], "environment": result.made_in}
        tags |= {k: v for k, v in {"taken_from": result.taken_from, "execution": execution}.items() if v}
        self.tracker.finish(self.open(), result.metrics | timings, tags, result.config["train"]["steps"])

    def fail(self, reason: str, status: Literal["FAILED", "KILLED"], **tags: str) -> None:
        """Mark the MLflow run as failed, or as interrupted (KILLED), with the reason, after its last metrics."""
        self._send_lines()
        self.tracker.fail(self.open(), reason, status, **tags)
