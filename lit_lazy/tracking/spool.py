"""A run's way into MLflow: metrics are written to the run folder, and copied from there when MLflow can be reached.

So training waits for no server, and an outage loses nothing: whoever finishes the run, now or in another process,
sends what is missing.
"""

import json
import logging
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import Logger

from lit_lazy.support.disk import write_text
from lit_lazy.tracking.tracker import Logged, Tracker, TrackingError
from lit_lazy.training.result import DIAGNOSTICS, RunResult

METRICS, RUN_ID = "metrics.jsonl", "mlflow_run_id"
SHIP_SECONDS = 5.0

log = logging.getLogger("lit_lazy.tracking.spool")


class MetricFile(Logger):
    """Lightning's logger into a run folder: one JSON line per step and call, appended.

    A resumed run repeats the steps since its checkpoint; what the file holds of them already is not written again.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        _drop_torn_line(self.path)
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
        """Append what the file does not hold yet of this step."""
        at = step or 0
        new = {name: float(value) for name, value in metrics.items() if (at, name) not in self._known}
        if new:
            self._known |= {(at, name) for name in new}
            line = {"step": at, "milliseconds": int(1000 * time.time()), "metrics": new}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[Logged]:
    """What a metric file holds; a line that is being written is left out."""
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [Logged(**json.loads(line)) for line in whole.splitlines()]


def _drop_torn_line(path: Path) -> None:
    """Remove the end of a file that a kill or a full disk left without its newline."""
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            with path.open("rb+") as file:
                file.truncate(len(whole))


@dataclass(frozen=True)
class Card:
    """How a run presents itself in MLflow."""

    name: str
    tags: Mapping[str, str]
    """`cell` among them: a run of this key that is there already is resumed."""
    params: Mapping[str, str]
    """Beside the whole config, which is logged by dotted path."""
    config: Mapping[str, Any]
    parent_id: str | None = None


class Spool:
    """Sends one run folder to one MLflow run."""

    def __init__(self, tracker: Tracker, folder: Path, card: Card) -> None:
        self.tracker, self.folder, self.card = tracker, folder, card
        self._sent = 0
        self._set_running = False

    def logger(self) -> MetricFile:
        """Lightning's logger for the run."""
        return MetricFile(self.folder)

    def run_id(self) -> str:
        """The run, the one it was begun with where there is one. Raises TrackingError."""
        known = self.folder / RUN_ID
        if known.exists():
            return known.read_text()
        # Another machine, or a call whose answer was lost, may have begun it.
        begun = self.tracker.find({"cell": self.card.tags["cell"], "kind": self.card.tags["kind"]})
        card = self.card
        run_id = (
            begun[-1].run_id
            if begun
            else self.tracker.start_run(card.name, card.tags, card.params, card.config, card.parent_id)
        )
        self.folder.mkdir(parents=True, exist_ok=True)  # a run may end before it makes its folder
        write_text(known, run_id)
        return run_id

    def send(self) -> None:
        """Send what was not sent yet. Raises TrackingError."""
        run_id = self.run_id()
        if not self._set_running:
            self.tracker.set_running(run_id)
            self._set_running = True
        lines = read_lines(self.folder / METRICS)
        self.tracker.log(run_id, lines[self._sent :])
        self._sent = len(lines)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send every few seconds from a thread of its own; that MLflow is away is logged once."""
        stop = threading.Event()

        def loop() -> None:
            told = False
            while True:
                try:
                    self.send()
                    told = False
                except (TrackingError, OSError) as error:
                    if not told:
                        log.warning("MLflow is away (%s); metrics are kept in %s", error, self.folder / METRICS)
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
            self.tracker.keep_files(self.run_id(), [kept])
        timings = {f"time/{name}": value for name, value in result.timings.items()}
        made_in = dict(result.environment)
        tags = {**result.labels, "git_sha": made_in.pop("git_sha")}
        tags["environment"] = ", ".join(f"{name} {value}" for name, value in made_in.items())
        self.tracker.finish(self.run_id(), {**result.metrics, **timings}, tags, step=result.config["train"]["steps"])

    def fail(self, reason: str, status: Literal["FAILED", "KILLED"]) -> None:
        """Mark the run failed (KILLED: interrupted), where MLflow can be reached; the queue knows it anyway."""
        try:
            self.send()
            self.tracker.fail(self.run_id(), reason, status)
        except TrackingError as error:
            log.warning("MLflow is away (%s); it will not show that this run has failed: %s", error, reason)
