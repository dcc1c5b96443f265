"""The metric file of a run folder, from which metrics are sent to MLflow whenever it can be reached."""

import json
import logging
import os
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from lit_lazy.support.disk import require_held, write_atomically
from lit_lazy.tracking.run_files import parse_line, read_lines
from lit_lazy.training.result import METRICS

log = logging.getLogger("lit_lazy.tracking.spool")


class MetricFile(Logger):
    """Lightning logger that appends one JSON line per step and call to a file in the run folder.

    A resumed run repeats the steps since its checkpoint; metrics that the file already contains are skipped.
    """

    def __init__(self, folder: Path, others: Sequence[Logger] = ()) -> None:
        """others: loggers that receive each new metric too."""
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
        """None: a run folder is named by the run's key and has no versions."""

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_args: Any, **_kwargs: Any) -> None:
        """No-op: the config is logged when the MLflow run starts."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append the metrics that the file lacks at this step, except Lightning's `epoch`."""
        step = step or 0
        new = {
            name: float(value) for name, value in metrics.items() if name != "epoch" and (step, name) not in self._known
        }
        if new:
            self._known |= {(step, name) for name in new}
            line = {"step": step, "milliseconds": int(1000 * time.time()), "metrics": new}
            require_held(self.path)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())  # a checkpoint that survives a power cut must not be ahead of its curves
            for other in self.others:
                other.log_metrics(new, step)


def _repair(path: Path) -> None:
    """Remove the lines that a kill, a full disk or a power cut damaged; the damaged file is quarantined."""
    if not path.exists():
        return
    content = path.read_bytes()
    *lines, torn = content.split(b"\n")
    valid = [line for line in lines if parse_line(line)]
    if damaged := len(lines) - len(valid):
        copy = path.with_name(f"{path.name}.damaged")
        write_atomically(copy, lambda file: file.write(content))
        log.warning("%s: %d of its lines are damaged; kept as %s, resumed without them", path, damaged, copy.name)
    if damaged or torn:
        write_atomically(path, lambda file: file.write(b"".join(line + b"\n" for line in valid)))
