"""RunConfig -> RunResult: the one function that trains and evaluates a run."""

import json
import logging
import math
import shutil
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import BaseFileLock, FileLock, Timeout
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from lit_lazy.config.files import list_imported_files
from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.data import DataSource
from lit_lazy.measure.diagnostics import STRONGEST, Diagnostics, Maps, measure, sample_validation
from lit_lazy.measure.evaluation import compute_size_metrics, evaluate
from lit_lazy.support.checks import require
from lit_lazy.support.disk import quarantine, write_text
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.support.provenance import collect_environment
from lit_lazy.training.checkpoints import find_resume_step
from lit_lazy.training.devices import select_training_device
from lit_lazy.training.distributed.process_group import RunSpec, start_ranks
from lit_lazy.training.execution import ONE_DEVICE, Execution
from lit_lazy.training.head_monitor import HeadMonitor, tau_history
from lit_lazy.training.module import DivergedError, LitLM
from lit_lazy.training.prepare import prepare
from lit_lazy.training.result import DIAGNOSTICS, FINAL_CHECKPOINT, RESULT, RunResult
from lit_lazy.training.trainer import MissedValidation, build_module, fit, make_trainer

log = logging.getLogger("lit_lazy.training.run")
CHECKPOINTS = "checkpoints"
METRIC = "metric "
"""What begins the names of metrics among the arrays that are kept of the untrained model."""


class CellBusyError(UnfinishedError):
    """Another process holds the run folder."""


def make_lock(folder: Path) -> BaseFileLock:
    """The lock of a run folder, which one process holds; it ends with its process."""
    return FileLock(folder / "lock")


def run(
    cfg: RunConfig,
    folder: Path,
    *,
    logger: Logger | None = None,
    callbacks: Sequence[Callback] = (),
    show_progress: bool = False,
    keep_checkpoint: bool = False,
    expected_key: str | None = None,
    execution: Execution = ONE_DEVICE,
    lock: BaseFileLock | None = None,
) -> RunResult:
    """Train and evaluate `cfg` in `folder`, or resume from the checkpoint that is there, or return the result that is.

    The checkpoints to resume from are removed in the end; keep_checkpoint leaves the trained model in `final.ckpt`.
    execution: how; it is no part of the run's key. lock: the folder's, where the caller holds it. The same config,
    seed, devices and thread count give the same metrics on the same machine bit for bit, also when the run was killed
    and resumed in between. Raises CellBusyError when another process works in the folder, DivergedError when the loss
    is no longer finite, ValueError when the folder belongs to another config, or when code or data changed since the
    cell got its key (expected_key), RankLostError and RankFailedError when another process of the run ended.
    """
    source = prepare(cfg, execution)
    key = cell_key(cfg, source.fingerprint)
    require(
        expected_key in (None, key),
        "cell",
        expected_key,
        f"its code or data have changed since, and it would be {key} now; give the same command again",
    )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (lock or make_lock(folder)).acquire(timeout=0):
            known = read_finished(folder)
            require(known is None or known.key == key, "folder", str(folder), "holds the result of another config")
            return known or _run(cfg, key, source, folder, logger, callbacks, show_progress, keep_checkpoint, execution)
    except Timeout:
        raise CellBusyError(f"another process works in {folder}") from None


def _run(
    cfg: RunConfig,
    key: str,
    source: DataSource,
    folder: Path,
    logger: Logger | None,
    callbacks: Sequence[Callback],
    show_progress: bool,
    keep_checkpoint: bool,
    execution: Execution,
) -> RunResult:
    module, watch, device = build_module(cfg, source, execution), HeadMonitor(source), select_training_device()
    module.model.to(device)
    with start_ranks(execution.devices) as group:
        untrained = _measure_untrained(
            folder / CHECKPOINTS / f"untrained-{key}.npz", lambda: measure_model(module, source, maps=None)
        )
        last = folder / CHECKPOINTS / "last.ckpt"
        for stray in folder.glob("hpc_ckpt_*.ckpt"):
            quarantine(stray, "left by Lightning's own requeueing")
        begun, first_step = time.perf_counter(), find_resume_step(last, cfg, module)
        if first_step:
            log.info("resumes at step %d of %d, from %s", first_step, cfg.train.steps, last)
        checkpoint, final = last if first_step else None, folder / FINAL_CHECKPOINT if keep_checkpoint else None
        if group:
            group.send_spec(
                RunSpec(
                    to_dict(cfg),
                    asdict(execution),
                    list_imported_files(),
                    source.fingerprint,
                    folder,
                    checkpoint,
                    final,
                )
            )
        callbacks = (MissedValidation(source, watch.losses), watch, *callbacks)
        trainer = make_trainer(cfg, folder, logger, callbacks, show_progress, execution, group)
        module = fit(trainer, module, cfg, source, checkpoint, group, final)
    trained = time.perf_counter()
    model = module.model.to(device)  # Lightning may have moved it to the CPU
    after = measure_model(module, source, STRONGEST)
    joined = Diagnostics.merge({"": after.diagnostics, "init/": untrained.diagnostics})
    diagnostics = Diagnostics(joined.arrays | tau_history(watch.taus))
    diagnostics.save(folder / DIAGNOSTICS)
    initial = {f"init/{name}": value for name, value in untrained.metrics.items()}
    evaluated = [evaluation.measure(model, cfg.data) for evaluation in cfg.evaluations]
    asked = {name: value for found in evaluated for name, value in found.items() if math.isfinite(value)}

    tokens = (cfg.train.steps - first_step) * cfg.train.batch_size * source.context_length
    result = RunResult(
        key=key,
        config=to_dict(cfg),
        data=source.info,
        metrics=after.metrics
        | initial
        | watch.get_intermediate_losses(cfg.train.steps)
        | compute_size_metrics(model)
        | diagnostics.scalars()
        | asked,
        labels={"backend": model.mixers[0].backend_name(source.outline.document_mask)},
        timings={
            "train_seconds": trained - begun,
            "evaluate_seconds": time.perf_counter() - trained,
            "tokens_per_second": tokens / (trained - begun),
        },
        environment=collect_environment(),
        fingerprint=source.fingerprint,
        execution=asdict(execution),
    )
    write_text(folder / RESULT, json.dumps(asdict(result), indent=1, sort_keys=True, allow_nan=False))
    _drop_checkpoints(folder)
    return result


class Measurement(NamedTuple):
    """What is known of a model at one moment."""

    metrics: dict[str, float]
    diagnostics: Diagnostics


def measure_model(module: LitLM, source: DataSource, maps: Maps | None) -> Measurement:
    """Evaluate and diagnose a model. Raises DivergedError where a metric is not finite."""
    train = module.cfg.train
    metrics = evaluate(module.model, source, train.precision, module.execution.evaluation_batch_size(train.batch_size))
    if not all(math.isfinite(value) for value in metrics.values()):
        raise DivergedError("the model's evaluation is not finite")
    return Measurement(metrics, measure(module.model, sample_validation(source), maps))


def _measure_untrained(path: Path, measured: Callable[[], Measurement]) -> Measurement:
    """What is known of the untrained model. A run that resumes reads what it found when it began."""
    with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
        kept = Diagnostics.load(path).arrays
        metrics = {name.removeprefix(METRIC): float(kept.pop(name)) for name in [*kept] if name.startswith(METRIC)}
        return Measurement(metrics, Diagnostics(kept))
    found = measured()
    path.parent.mkdir(exist_ok=True)
    metrics = {METRIC + name: np.array(value) for name, value in found.metrics.items()}
    Diagnostics(found.diagnostics.arrays | metrics).save(path)
    return found


def read_finished(folder: Path) -> RunResult | None:
    """The result of a finished run, or None; checkpoints that a kill had left beside it are removed."""
    result = RunResult.read(folder)
    if result is not None:
        _drop_checkpoints(folder)
    return result


def _drop_checkpoints(folder: Path) -> None:
    """Remove what a run resumes from, but for what was quarantined."""
    checkpoints = folder / CHECKPOINTS
    for aside in checkpoints.glob("*.damaged"):
        aside.replace(folder / aside.name)
    shutil.rmtree(checkpoints, ignore_errors=True)  # another process may be at it
