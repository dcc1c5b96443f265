"""One training, tracked in MLflow: what `lit-lazy train` does."""

from contextlib import nullcontext
from pathlib import Path

import torch

from lit_lazy.config.canonical import to_dict
from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.support.disk import writable_folder
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.support.provenance import git_sha
from lit_lazy.tracking.spool import Card, Spool
from lit_lazy.tracking.tracker import Tracker, TrackingError, check_store, default_uri
from lit_lazy.training.cost import cost_of, require_fit
from lit_lazy.training.execution import ONE_DEVICE, Execution
from lit_lazy.training.prepare import prepare
from lit_lazy.training.result import RunResult
from lit_lazy.training.run import finished, run


def train_tracked(
    cfg: RunConfig,
    name: str,
    runs: Path,
    threads: int | None = None,
    keep_checkpoint: bool = False,
    execution: Execution = ONE_DEVICE,
) -> RunResult:
    """Train in `runs/train-<name>/<key>` under the MLflow experiment `train-<name>`; a finished run is returned.

    A run that was cut off resumes from its checkpoint, in the MLflow run it was begun with. While MLflow is away the
    metrics are kept in the run folder; the same command sends them later.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    source = prepare(cfg, execution)
    require_fit(cost_of(cfg, source.outline, execution), execution)
    key = cell_key(cfg, source.fingerprint)
    writable_folder("--runs", runs)
    uri = default_uri(runs)
    check_store(uri)
    folder = runs / f"train-{name}" / key
    tags = {"kind": "run", "cell": key, "seed": str(cfg.seed), "git_sha": git_sha()}
    card = Card(f"{name} seed {cfg.seed}", tags, {}, to_dict(cfg))
    spool = Spool(Tracker(uri, runs, f"train-{name}"), folder, card)
    known = finished(folder)
    try:
        with spool.sending() if known is None else nullcontext():
            result = known or run(
                cfg,
                folder,
                logger=spool.logger(),
                show_progress=True,
                keep_checkpoint=keep_checkpoint,
                execution=execution,
            )
    except BaseException as error:
        spool.fail(repr(error)[:500], "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
        raise
    try:
        spool.finish(result)
    except TrackingError as error:
        raise UnfinishedError(
            f"trained, but MLflow did not take the result ({error}); it is kept in {folder}, and the same command "
            "sends it"
        ) from error
    return result
