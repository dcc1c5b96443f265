"""One training, tracked in MLflow: what `lit-lazy train` does."""

from pathlib import Path

import torch

from lit_lazy.config import RunConfig, cell_key, to_dict
from lit_lazy.run import RunResult, git_sha, prepare, run
from lit_lazy.tracking import Tracker, default_uri


def train_tracked(
    cfg: RunConfig, name: str, runs: Path, threads: int | None = None, keep_checkpoint: bool = False
) -> RunResult:
    """Train in `runs/train-<name>/<key>` under the MLflow experiment `train-<name>`; a finished run is returned.

    A run that was cut off goes on from its checkpoint, in the MLflow run it was begun with.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    key = cell_key(cfg, prepare(cfg).fingerprint)
    folder = runs / f"train-{name}" / key
    tracker = Tracker(default_uri(runs), runs, f"train-{name}")
    begun = tracker.find({"cell": key})
    tags = {"kind": "run", "cell": key, "seed": str(cfg.seed), "git_sha": git_sha()}
    run_id = begun[-1].run_id if begun else tracker.start_run(f"{name} seed {cfg.seed}", tags, {}, to_dict(cfg))
    if begun and begun[-1].state == "complete" and (known := RunResult.read(folder)):
        return known
    try:
        result = run(cfg, folder, logger=tracker.logger(run_id), show_progress=True, keep_checkpoint=keep_checkpoint)
    except BaseException as error:
        tracker.fail(run_id, repr(error)[:500], "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    tracker.finish(run_id, {**result.metrics, **result.timings}, result.labels, step=cfg.train.steps)
    return result
