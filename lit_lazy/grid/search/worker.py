"""Worker process of a search: claims points, trains them, and prunes those that are worse than most."""

import logging
import sys
from collections.abc import Callable
from typing import cast

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_lazy.grid.jobs.worker import Worker, main
from lit_lazy.grid.queue.queue import CellLostError, Task
from lit_lazy.grid.search.definition import MONITORED
from lit_lazy.grid.search.queue import SearchQueue
from lit_lazy.tracking.store import TrackingError
from lit_lazy.tracking.tracked_run import ActiveRun
from lit_lazy.training.module import DivergedError
from lit_lazy.training.result import RunResult
from lit_lazy.training.run_folder import remove_checkpoints
from lit_lazy.training.trainer import AtStart, MissedValidation

log = logging.getLogger("lit_lazy.worker")


class PrunedError(Exception):
    """The training is not worth its remaining steps."""


class Pruning(AtStart):
    """Ends a hopeless training with PrunedError after any validation but the last."""

    def __init__(self, metric: str, is_hopeless: Callable[[int, float], bool]) -> None:
        """is_hopeless: called with the step and the metric."""
        self.metric, self.is_hopeless = metric, is_hopeless

    def on_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:  # noqa: ARG002
        for part in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(part, MissedValidation) and part.repeated:
                self._judge(trainer, part.repeated[self.metric])

    def on_validation_end(self, trainer: L.Trainer, _module: L.LightningModule) -> None:  # pyrefly: ignore
        self._judge(trainer, float(trainer.callback_metrics[self.metric]))

    def _judge(self, trainer: L.Trainer, value: float) -> None:
        step = trainer.global_step
        if self.is_hopeless(step, value) and step < trainer.max_steps:
            raise PrunedError(f"{self.metric} {value:.4g} at step {step} is worse than the median of the points there")


class SearchWorker(Worker):
    """Executes points of one search."""

    @property
    def search(self) -> SearchQueue:
        """The queue, typed."""
        return cast(SearchQueue, self.queue)

    def _make_callbacks(self, task: Task) -> list[Callback]:
        metric = MONITORED[self.search.definition.objective]
        return [Pruning(metric, lambda step, value: self.search.should_prune(task, step, value))]

    def _get_objective(self, result: RunResult) -> float:
        return result.metrics[self.search.definition.objective]

    def _handle_failure(self, task: Task, run: ActiveRun, error: Exception) -> None:
        """Also prune a point that diverged: a failed one would be retried and would not inform the sampler."""
        if isinstance(error, CellLostError):
            log.warning("%s", error)
        elif isinstance(error, PrunedError | DivergedError):
            self._prune(task, run, error)
        else:
            super()._handle_failure(task, run, error)

    def _prune(self, task: Task, run: ActiveRun, error: PrunedError | DivergedError) -> None:
        diverged = isinstance(error, DivergedError)
        reason = f"diverged: {error}" if diverged else str(error)
        log.info("pruned %s: %s", task.cell.variant, reason)
        try:
            run.send()
            self.tracker.prune(run.get_run_id(), reason)
        except TrackingError as away:
            log.warning("MLflow is away (%s); `lit-lazy ablate search` reports it at its end", away)
        try:
            self.search.prune(task, reason, diverged)
            remove_checkpoints(run.folder)
        except CellLostError as lost:
            log.warning("%s", lost)


if __name__ == "__main__":
    sys.exit(main(SearchQueue, SearchWorker))
