"""A worker process of a search: takes points, trains them, and ends early those that are worse than most."""

import logging
import shutil
import sys
from collections.abc import Callable
from typing import cast

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_lazy.grid.jobs.worker import Worker, main
from lit_lazy.grid.queue.queue import CellLostError, Task
from lit_lazy.grid.search.definition import MONITORED
from lit_lazy.grid.search.queue import SearchQueue
from lit_lazy.tracking.spool import Spool
from lit_lazy.tracking.store import TrackingError
from lit_lazy.training.module import DivergedError
from lit_lazy.training.result import RunResult

log = logging.getLogger("lit_lazy.worker")


class PrunedError(Exception):
    """A training that is not worth its remaining steps."""


class Pruning(Callback):
    """Ends a training by PrunedError after a validation, except after the last, when it is done anyway."""

    def __init__(self, metric: str, is_hopeless: Callable[[int, float], bool]) -> None:
        """is_hopeless: is given the step and the metric."""
        self.metric, self.is_hopeless = metric, is_hopeless

    def on_validation_end(self, trainer: L.Trainer, _module: L.LightningModule) -> None:  # pyrefly: ignore
        step, value = trainer.global_step, float(trainer.callback_metrics[self.metric])
        if self.is_hopeless(step, value) and step < trainer.max_steps:
            raise PrunedError(f"{self.metric} {value:.4g} at step {step} is worse than the median of the points there")


class SearchWorker(Worker):
    """Executes points of one search."""

    @property
    def search(self) -> SearchQueue:
        """The queue."""
        return cast(SearchQueue, self.queue)

    def _make_callbacks(self, task: Task) -> list[Callback]:
        metric = MONITORED[self.search.definition.objective]
        return [Pruning(metric, lambda step, value: self.search.should_prune(task, step, value))]

    def _get_objective(self, result: RunResult) -> float:
        return result.metrics[self.search.definition.objective]

    def _handle_failure(self, task: Task, spool: Spool, error: Exception) -> None:
        """A point that diverged is pruned too: a failed one would tell the sampler nothing, and be tried again."""
        if isinstance(error, CellLostError):
            log.warning("%s", error)
        elif isinstance(error, PrunedError | DivergedError):
            self._prune(task, spool, error)
        else:
            super()._handle_failure(task, spool, error)

    def _prune(self, task: Task, spool: Spool, error: PrunedError | DivergedError) -> None:
        diverged = isinstance(error, DivergedError)
        reason = f"diverged: {error}" if diverged else str(error)
        log.info("pruned %s: %s", task.cell.variant, reason)
        try:
            spool.send()
            self.tracker.prune(spool.get_run_id(), reason)
        except TrackingError as away:
            log.warning("MLflow is away (%s); `lit-lazy ablate search` reports it in the end", away)
        try:
            self.search.prune(task, reason, diverged)
            shutil.rmtree(self.folder / "cells" / task.cell.key / "checkpoints", ignore_errors=True)
        except CellLostError as lost:
            log.warning("%s", lost)


if __name__ == "__main__":
    sys.exit(main(SearchQueue, SearchWorker))
