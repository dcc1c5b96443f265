"""A worker process: takes cells from the queue, trains them, and does the bookkeeping, until none is left."""

import argparse
import logging
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from lit_lazy.config import RunConfig, from_dict
from lit_lazy.files import load_module
from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.queue import Queue, Task
from lit_lazy.run import CellBusyError, RunResult, git_sha, run, write_atomically
from lit_lazy.tracking import Tracker

RUN_ID = "mlflow_run_id"

log = logging.getLogger("lit_lazy.worker")


@dataclass(frozen=True)
class Worker:
    """Executes cells of one ablation."""

    queue: Queue
    tracker: Tracker
    parent_id: str
    folder: Path
    """The ablation's folder; a cell's run folder is `cells/<key>` below it."""
    keep_checkpoints: bool = False

    def work(self) -> None:
        """Execute waiting cells until there is none. A cell that fails is recorded, and the rest goes on."""
        while task := self.queue.claim():
            self._execute(task)

    def _execute(self, task: Task) -> None:
        cell = task.cell
        log.info("start %s seed %d (%s)", cell.variant, cell.seed, cell.key)
        try:
            result = self._train(cell)
            self.queue.complete(task, result.metrics["loss/val"])
            log.info("done %s seed %d", cell.variant, cell.seed)
        except KeyboardInterrupt:
            self._fail(task, "interrupted", interrupted=True)
            raise
        except CellBusyError as error:
            self.queue.fail(task, str(error))
        except Exception as error:
            # A cell may fail in any way; its reason is kept and the rest of the grid goes on.
            log.error("%s seed %d failed\n%s", cell.variant, cell.seed, traceback.format_exc())
            self._fail(task, one_line(error))

    def _train(self, cell: Cell) -> RunResult:
        """The order of finishing: result.json, then MLflow's final metrics, then (by the caller) the queue."""
        folder = self.folder / "cells" / cell.key
        folder.mkdir(parents=True, exist_ok=True)
        run_id = self._run_id(cell, folder)
        # A finished cell only lacks bookkeeping: opening its logger would set the run running again.
        result = RunResult.read(folder) or run(
            from_dict(RunConfig, cell.config),
            folder,
            logger=self.tracker.logger(run_id),
            keep_checkpoint=self.keep_checkpoints,
        )
        timings = {f"time/{name}": value for name, value in result.timings.items()}
        made_in = dict(result.environment)
        tags = {**result.labels, "git_sha": made_in.pop("git_sha")}
        tags["environment"] = ", ".join(f"{name} {value}" for name, value in made_in.items())
        self.tracker.finish(run_id, {**result.metrics, **timings}, tags, step=result.config["train"]["steps"])
        return result

    def _run_id(self, cell: Cell, folder: Path) -> str:
        """The cell's MLflow run, the one it was begun with where there is one."""
        known = folder / RUN_ID
        if known.exists():
            return known.read_text()
        tags = {
            "kind": "cell",
            "ablation": self.queue.name,
            "variant": cell.variant,
            "source": cell.source,
            "seed": str(cell.seed),
            "cell": cell.key,
            "git_sha": git_sha(),
        }
        name = f"{cell.variant} seed {cell.seed}"
        run_id = self.tracker.start_run(name, tags, cell.axes, cell.config, self.parent_id)
        write_atomically(known, run_id)
        return run_id

    def _fail(self, task: Task, reason: str, interrupted: bool = False) -> None:
        known = self.folder / "cells" / task.cell.key / RUN_ID
        if known.exists():
            self.tracker.fail(known.read_text(), reason, "KILLED" if interrupted else "FAILED")
        self.queue.fail(task, reason)


def one_line(error: BaseException) -> str:
    """Type and first line of an exception."""
    first = str(error).strip().splitlines()[:1]
    return ": ".join([type(error).__name__, *first])[:500]


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Entry point of a worker process, started by `lit-lazy ablate run`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--study", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--tracking-uri", required=True)
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--parent", required=True)
    parser.add_argument("--keep-checkpoints", action="store_true")
    parser.add_argument("--import", dest="files", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stdout)
    signal.signal(signal.SIGTERM, _interrupt)

    git_sha()
    import torch

    torch.set_num_threads(options.threads)
    for file in options.files:
        load_module(file)
    worker = Worker(
        Queue(options.storage, options.study),
        Tracker(options.tracking_uri, options.folder.parent, options.experiment),
        options.parent,
        options.folder,
        options.keep_checkpoints,
    )
    try:
        worker.work()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
