"""A run's way into MLflow: metrics are written to the run folder, and copied from there when MLflow can be reached.

So training waits for no server, and an outage loses nothing: whoever finishes the run, now or in another process,
sends what is missing.
"""

import json
import logging
import os
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger

from lit_lazy.support.disk import write_atomically, write_text
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.tracking.store import TrackingError
from lit_lazy.tracking.tracker import MetricRecord, Tracker
from lit_lazy.training.result import DIAGNOSTICS, RunResult

METRICS, RUN_ID = "metrics.jsonl", "mlflow_run_id"
SHIP_SECONDS = 5.0

log = logging.getLogger("lit_lazy.tracking.spool")


class MetricFile(Logger):
    """Lightning's logger into a run folder: one JSON line per step and call, appended.

    A resumed run repeats the steps since its checkpoint; what the file holds of them already is not written again.
    """

    def __init__(self, folder: Path, others: Sequence[Logger] = ()) -> None:
        """others: loggers that hear each number once too."""
        super().__init__()
        self.others = others
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        _repair(self.path)
        self._known = {(line.step, name) for line in read_lines(self.path) for name in line.metrics}

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def version(self) -> None:
        """None: the run folder is named by the run's key, there are no versions of it."""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to do: the config is logged when the MLflow run begins."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append what the file does not hold yet of this step; Lightning's count of epochs is no measurement."""
        at = step or 0
        new = {
            name: float(value) for name, value in metrics.items() if name != "epoch" and (at, name) not in self._known
        }
        if new:
            self._known |= {(at, name) for name in new}
            line = {"step": at, "milliseconds": int(1000 * time.time()), "metrics": new}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a checkpoint that outlives a power cut must not be ahead of its curves
            for other in self.others:
                other.log_metrics(new, at)


def read_lines(path: Path) -> list[MetricRecord]:
    """What a metric file holds, but for a line that is being written, and for damaged ones."""
    if not path.exists():
        return []
    return [logged for line in path.read_bytes().split(b"\n")[:-1] if (logged := _parse_line(line))]


def _parse_line(line: bytes) -> MetricRecord | None:
    try:
        return MetricRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None


def _repair(path: Path) -> None:
    """Leave the whole lines of a file, one by one: a kill, a full disk or a power cut damages others."""
    if not path.exists():
        return
    content = path.read_bytes()
    *lines, torn = content.split(b"\n")
    whole = [line for line in lines if _parse_line(line)]
    if damaged := len(lines) - len(whole):
        aside = path.with_name(f"{path.name}.damaged")
        write_atomically(aside, lambda file: file.write(content))
        log.warning("%s: %d of its lines are damaged; kept as %s, resumed without them", path, damaged, aside.name)
    if damaged or torn:
        write_atomically(path, lambda file: file.write(b"".join(line + b"\n" for line in whole)))


@dataclass(frozen=True)
class RunCard:
    """How a run presents itself in MLflow."""

    name: str
    tags: Mapping[str, str]
    """`cell` and `kind` among them."""
    params: Mapping[str, str]
    """Beside the whole config, which is logged by dotted path."""
    config: Mapping[str, Any]
    parent_id: str | None = None


class Spool:
    """Sends one run folder to one MLflow run."""

    def __init__(
        self, tracker: Tracker, folder: Path, card: RunCard, is_ours: Callable[[], bool] = lambda: True
    ) -> None:
        """is_ours: asked before a run is begun, which retires another's of the same cell."""
        self.tracker, self.folder, self.card = tracker, folder, card
        self._is_ours = is_ours
        self._run_id: str | None = None
        self._sent = 0
        self._set_running = False

    def make_logger(self, others: Sequence[Logger] = ()) -> MetricFile:
        """Lightning's logger for the run. others: loggers beside it."""
        return MetricFile(self.folder, others)

    def get_run_id(self) -> str:
        """The run, the one it was begun with where there is one. Raises TrackingError."""
        if self._run_id is None:
            known = self.folder / RUN_ID
            begun = known.read_text() if known.exists() else ""
            self._run_id = begun if begun and self.tracker.has_run(begun) else self._start_run(known)
        return self._run_id

    def _start_run(self, known: Path) -> str:
        """A new run, in place of one that was begun elsewhere: its curves would stand there twice.

        Where it was begun its metrics were measured at other times. Or it was cut off before it was described.
        """
        card = self.card
        if not self._is_ours():
            raise TrackingError(f"{card.name} was given to another worker meanwhile", reachable=True)
        same = {"cell": card.tags["cell"], "kind": card.tags["kind"]}
        if card.parent_id:
            same["mlflow.parentRunId"] = card.parent_id
        for begun in self.tracker.find(same):
            self.tracker.retire(begun.run_id)
        run_id = self.tracker.start_run(card.name, card.tags, card.params, card.config, card.parent_id)
        self.folder.mkdir(parents=True, exist_ok=True)  # a run may end before it makes its folder
        write_text(known, run_id)
        return run_id

    def send(self) -> None:
        """Send what was not sent yet. Raises TrackingError."""
        run_id = self.get_run_id()
        if not self._set_running:
            self.tracker.set_running(run_id)
            self._set_running = True
        lines = read_lines(self.folder / METRICS)
        self.tracker.log(run_id, lines[self._sent :])
        self._sent = len(lines)

    @contextmanager
    def send_in_background(self, at_first: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Send every few seconds from a thread of its own; that MLflow is away is logged once.

        at_first: called there once the run has begun.
        """
        stop = threading.Event()

        def loop() -> None:
            told = begun = False
            while True:
                try:
                    self.send()
                    if not begun:
                        at_first()
                    told, begun = False, True
                except (UnfinishedError, OSError) as error:
                    if not told:
                        log.warning("metrics are kept in %s, MLflow lacks them: %s", self.folder / METRICS, error)
                    told = True
                if stop.wait(SHIP_SECONDS):
                    return

        thread = threading.Thread(target=loop, name="spool", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def finish(self, result: RunResult) -> None:
        """Send everything and mark the run complete; doing it again changes nothing. Raises TrackingError."""
        # Of a run that is complete already only its record was left: it is not set running again.
        self._set_running = True
        self.send()
        if (kept := self.folder / DIAGNOSTICS).exists():
            self.tracker.log_files(self.get_run_id(), [kept])
        timings = {f"time/{name}": value for name, value in result.timings.items()}
        made_in = dict(result.environment)
        tags = {**result.labels, "git_sha": made_in.pop("git_sha")}
        tags["environment"] = ", ".join(f"{name} {value}" for name, value in sorted(made_in.items()))
        if result.execution:
            tags["execution"] = ", ".join(f"{name} {value}" for name, value in sorted(result.execution.items()))
        self.tracker.finish(
            self.get_run_id(), {**result.metrics, **timings}, tags, step=result.config["train"]["steps"]
        )

    def fail(self, reason: str, status: Literal["FAILED", "KILLED"]) -> None:
        """Mark the run failed (KILLED: interrupted), where MLflow can be reached; the queue knows it anyway."""
        try:
            self.send()
            self.tracker.fail(self.get_run_id(), reason, status)
        except TrackingError as error:
            log.warning("MLflow is away (%s); it will not show that this run has failed: %s", error, reason)
