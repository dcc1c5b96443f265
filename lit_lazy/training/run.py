"""`run`: trains and evaluates a RunConfig, and returns its RunResult."""

import logging
import math
import shutil
import time
import zipfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import BaseFileLock, Timeout
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from lit_lazy.config.evaluation import Evaluation
from lit_lazy.config.key import cell_key, evaluation_key, training_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.config.user_classes import is_users, list_user_files
from lit_lazy.data import DataConfig, DataSource, describe_repetition
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.measure.diagnostics import STRONGEST, Maps, measure, sample_validation
from lit_lazy.measure.evaluation import compute_size_metrics, evaluate, measure_evaluation
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.checked_fields import require
from lit_lazy.support.disk import quarantine
from lit_lazy.support.error_messages import BusyError
from lit_lazy.support.provenance import collect_environment
from lit_lazy.training import checkpoints
from lit_lazy.training.callbacks_and_loggers import (
    BackendMonitor,
    MetricFile,
    MissedValidation,
    TimeMonitor,
    open_loggers,
)
from lit_lazy.training.check_before_run import prepare, validates_on_training
from lit_lazy.training.execution_settings import (
    ONE_DEVICE,
    Execution,
    describe_backend,
    find_busy_cores,
    find_missing_backend,
    select_training_device,
)
from lit_lazy.training.head_monitor import HeadMonitor, make_history_arrays
from lit_lazy.training.ineffective_settings import list_ineffective
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.module import DivergedError, LitLM
from lit_lazy.training.ranks import start_ranks
from lit_lazy.training.run_folder import (
    CHECKPOINTS,
    DIAGNOSTICS,
    FINAL_CHECKPOINT,
    LAST,
    METRICS,
    RESULT,
    RunResult,
    make_lock,
    remove_checkpoints,
    write_settings,
)
from lit_lazy.training.trainer import build_module, fit

log = logging.getLogger("lit_lazy.training.run")
_tried: set[str] = set()
"""Keys of users' evaluations that this process has tried on an untrained model."""
METRIC = "metric "
"""Prefix of the metrics among the cached arrays of the untrained model."""


def run(
    cfg: RunConfig,
    folder: Path,
    *,
    logger: Logger | None = None,
    callbacks: Sequence[Callback] = (),
    keep_checkpoint: bool = False,
    expected_key: str | None = None,
    execution: Execution = ONE_DEVICE,
    lock: BaseFileLock | None = None,
    interrupts: Interrupts | None = None,
) -> RunResult:
    """Train and evaluate `cfg` in `folder`, resume from the folder's checkpoint, or return the folder's result.

    If a folder beside it holds the same training, only what that did not measure is measured, on its kept model.

    A finished run removes its checkpoints; keep_checkpoint leaves the trained model in `final.ckpt`. execution: how to
    run; not part of the run's key. lock: the folder's lock, if the caller holds it. interrupts: entered by
    the caller; one ends the training after its step, with a checkpoint; None to end it at once. The same config, seed,
    devices and thread count give bit-identical metrics on the same machine, also if the run was killed and resumed.

    Raises BusyError if another process works in the folder, DivergedError if the loss is not finite, ValueError if
    the folder belongs to another config or if code or data changed since the cell got its key (expected_key),
    RankLostError and RankFailedError if another process of the run ended.
    """
    source = prepare(cfg, execution)
    key = cell_key(cfg, source.fingerprint)
    now = f"its code or data have changed since, its key is {key} now"
    fix = f"{now}; undo the edit, or repeat the command with --changed, of a search with --fresh"
    require(expected_key in (None, key), "cell", expected_key, fix)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (lock or make_lock(folder)).acquire(timeout=0):
            known = read_finished(folder)
            require(known is None or known.key == key, "folder", str(folder), "holds the result of another config")
            if known is not None:
                known.require_settings(to_dict(cfg))
                return known
            write_settings(folder, key, source.fingerprint, to_dict(cfg))
            if (result := _measure_known(cfg, key, source, folder)) is not None:
                return result
            settings = logger, callbacks, keep_checkpoint, execution, interrupts
            return _run(cfg, key, source, folder, *settings)
    except Timeout:
        raise BusyError(f"another process works in {folder}") from None


def train_logged(
    cfg: RunConfig,
    folder: Path,
    project: str,
    name: str,
    loggers: Sequence[str] = (),
    *,
    interrupts: Interrupts,
    **options: Any,
) -> RunResult:
    """Train in a run folder, with its metric file and `loggers`, and return the result; an earlier one if it has one.

    A run that has a result already is only logged to loggers that lack it. project, name: for loggers that send the run
    to a server. interrupts: allowed within the training. options: of `run`.
    """
    if (known := read_finished(folder)) is not None:
        known.require_settings(to_dict(cfg))
    missing = [kind for kind in loggers if known is None or not (folder / kind).exists()]
    with open_loggers(missing, folder, project, name, to_dict(cfg)) as others, interrupts.allow():
        file = MetricFile(folder, others)
        result = known or run(cfg, folder, logger=file, interrupts=interrupts, **options)
        for other in others:
            other.log_metrics(result.metrics, cfg.train.steps)
    return result


def _announce(cfg: RunConfig, source: DataSource, module: LitLM) -> str:
    """Name of the attention's implementation. Logs it, and what makes the training slow or its figures doubtful."""
    with torch.autocast(module.model.device.type, torch.bfloat16, enabled=cfg.train.precision == "bf16"):
        backend = module.model.mixers[0].backend_name(source.outline.document_mask)
    missing = find_missing_backend() if (backend, cfg.model.backend) == ("chunked", "auto") else None
    where = describe_backend(backend) + (f"; {missing}" if missing else "")
    log.info("attention: %s, runs on %s", cfg.model.rule, where)
    for note in filter(None, (find_busy_cores(), *list_ineffective(cfg, source.context_length))):
        log.info("%s", note)
    tokens = cfg.train.steps * cfg.train.batch_size * source.context_length
    if repeated := describe_repetition(source.info, tokens):
        log.warning("data=%s: %s", type(cfg.data).__name__, repeated)
    if validates_on_training(source):
        what = "validation begins with the training sequences, so its loss says nothing of new ones; give it others"
        log.warning("data=%s: %s", type(cfg.data).__name__, what)
    return backend


def _run(
    cfg: RunConfig,
    key: str,
    source: DataSource,
    folder: Path,
    logger: Logger | None,
    callbacks: Sequence[Callback],
    keep_checkpoint: bool,
    execution: Execution,
    interrupts: Interrupts | None,
) -> RunResult:
    module, monitor, device = build_module(cfg, source, execution), HeadMonitor(source), select_training_device()
    module.model.to(device)
    backend = _announce(cfg, source, module)
    with start_ranks(execution.devices) as group:
        untrained = _measure_untrained(folder / CHECKPOINTS / f"untrained-{key}.npz", module, source)
        if (untrained.diagnostics.arrays.get("mass/dead", np.zeros(1)) == 1).all():
            problem = "at the start no query after the first gives a key weight (mass 0)"
            effect = "the attention passes nothing and gets no gradient"
            log.warning("%s: %s; choose a lower threshold", problem, effect)
        started, time_monitor = time.perf_counter(), TimeMonitor()
        checkpoint, first_step = _find_checkpoint(folder, cfg, module)
        for own in (one for one in cfg.evaluations if is_users(type(one)) and evaluation_key(one) not in _tried):
            measure_evaluation(own, module.model, cfg.data)  # what is wrong with it costs no training
            _tried.add(evaluation_key(own))
        final = folder / FINAL_CHECKPOINT if keep_checkpoint else None
        if group:
            settings = {"config": to_dict(cfg), "execution": asdict(execution), "files": list_user_files(cfg)}
            group.send_spec(
                **settings, fingerprint=source.fingerprint, folder=folder, checkpoint=checkpoint, final=final
            )
        kept = time_monitor, BackendMonitor(describe_backend(backend)), MissedValidation(source, monitor.losses)
        callbacks = (*kept, monitor, *callbacks)
        module = fit(module, source, folder, logger, callbacks, checkpoint, final, group, interrupts)
        train_seconds = time_monitor.seconds
    trained = time.perf_counter()
    module.model.to(device)  # Lightning may have moved it to the CPU
    metrics = _measure_trained(module, source, untrained, monitor, folder / DIAGNOSTICS)
    evaluated = _evaluate(module.model, cfg.evaluations, cfg.data, metrics.keys())

    tokens = (cfg.train.steps - first_step) * cfg.train.batch_size * source.context_length
    result = RunResult(
        key=key,
        config=to_dict(cfg),
        data=source.info,
        metrics=metrics | {name: value for found in evaluated.values() for name, value in found.items()},
        labels={"backend": backend},
        timings={
            "train_seconds": train_seconds,
            "evaluate_seconds": time.perf_counter() - trained,
            "tokens_per_second": tokens / (trained - started),
        },
        environment=collect_environment(),
        fingerprint=source.fingerprint,
        execution=asdict(execution),
        training_key=training_key(cfg, source.fingerprint),
        evaluations={name: sorted(found) for name, found in evaluated.items()},
    )
    result.write(folder)
    remove_checkpoints(folder)
    return result


def _find_checkpoint(folder: Path, cfg: RunConfig, module: LitLM) -> tuple[Path | None, int]:
    """The checkpoint to resume from and its step; None and 0 for a run that starts."""
    for stray in folder.glob("hpc_ckpt_*.ckpt"):
        quarantine(stray, "left by Lightning's own requeueing")
    last = folder / CHECKPOINTS / LAST
    step = checkpoints.find_resume_step(last, cfg, module)
    if step:
        log.info("resumes at step %d of %d, from %s", step, cfg.train.steps, last)
    return last if step else None, step


class Measurement(NamedTuple):
    """Metrics and diagnostics of a model, untrained or trained."""

    metrics: dict[str, float]
    diagnostics: Diagnostics


def _measure_trained(
    module: LitLM, source: DataSource, untrained: Measurement, monitor: HeadMonitor, path: Path
) -> dict[str, float]:
    """The metrics of a run without its evaluations. Saves its diagnostics at `path`."""
    trained = measure_model(module, source, STRONGEST)
    merged = Diagnostics.merge({"": trained.diagnostics, "init/": untrained.diagnostics})
    diagnostics = Diagnostics(merged.arrays | make_history_arrays(monitor.learned))
    diagnostics.save(path)
    return (
        trained.metrics
        | {f"init/{name}": value for name, value in untrained.metrics.items()}
        | monitor.get_intermediate_losses(module.cfg.train.steps)
        | monitor.find_steps_to_learn(module.cfg.train.steps)
        | compute_size_metrics(module.model)
        | diagnostics.scalars()
    )


def _measure_known(cfg: RunConfig, key: str, source: DataSource, folder: Path) -> RunResult | None:
    """The result in `folder` of a training whose model another folder beside it keeps; None if there is none.

    Evaluations that it lacks are measured on that model, which stays with the result.
    """
    own = training_key(cfg, source.fingerprint)
    asked = {evaluation_key(one): one for one in cfg.evaluations}
    for model in folder.parent.glob(f"*/{FINAL_CHECKPOINT}"):
        # Parsed only if it may serve: it names its key, which is the training key without evaluations.
        path = model.with_name(RESULT)
        known = RunResult.peek(path.parent) if path.exists() and own.encode() in path.read_bytes() else None
        if known is None or known.key == key or known.training_key != own:
            continue
        kept = known.keep_evaluations(asked.keys())
        left = [one for name, one in asked.items() if name not in known.evaluations]
        if kept is None:
            continue
        log.info("trained already, in %s", path.parent)
        begun, evaluated = time.perf_counter(), {}
        if left:
            trained = checkpoints.load(model).model.to(select_training_device())
            evaluated = _evaluate(trained, left, cfg.data, kept.metrics.keys())
        result = replace(
            kept,
            key=key,
            config=to_dict(cfg),
            metrics=kept.metrics | {name: value for found in evaluated.values() for name, value in found.items()},
            evaluations=kept.evaluations | {name: sorted(found) for name, found in evaluated.items()},
            timings=kept.timings | {"evaluate_seconds": time.perf_counter() - begun},
        )
        if result.keep_evaluations(asked) is None:
            continue
        for file in filter(Path.exists, map(path.with_name, (METRICS, DIAGNOSTICS, FINAL_CHECKPOINT))):
            shutil.copyfile(file, folder / file.name)
        result.write(folder)
        return result
    return None


def _evaluate(
    model: DecoderLM, evaluations: Sequence[Evaluation], data: DataConfig, known: Collection[str]
) -> dict[str, dict[str, float]]:
    """The finite metrics of each evaluation by name, by the evaluation's key.

    A name that is `known`, or that an evaluation before it gave, is preceded by the evaluation's class and key.
    """
    measured, taken = dict[str, dict[str, float]](), {*known}
    for one in evaluations:
        key = evaluation_key(one)
        found = measure_evaluation(one, model, data)
        if both := sorted(taken & found.keys()):
            apart = f"{type(one).__name__}-{key[:6]}/"
            log.warning("evaluations: %s is measured twice; that of %r is %s", both[0], one, apart + both[0])
            found = {apart + name if name in taken else name: value for name, value in found.items()}
        measured[key] = found
        taken |= found.keys()
    return measured


def measure_model(module: LitLM, source: DataSource, maps: Maps | None) -> Measurement:
    """Evaluate and diagnose a model. Raises DivergedError if a metric is not finite."""
    train = module.cfg.train
    metrics = evaluate(module.model, source, train.precision, module.execution.evaluation_batch_size(train.batch_size))
    if not all(math.isfinite(value) for value in metrics.values()):
        raise DivergedError("the model's evaluation is not finite")
    sample = module.cfg.diagnosed_sequences
    return Measurement(metrics, measure(module.model, sample_validation(source, sample), maps, sample))


def _measure_untrained(path: Path, module: LitLM, source: DataSource) -> Measurement:
    """The untrained model's measurement, cached at `path` for a run that resumes."""
    with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
        arrays = Diagnostics.load(path).arrays
        metrics = {name.removeprefix(METRIC): float(arrays.pop(name)) for name in [*arrays] if name.startswith(METRIC)}
        return Measurement(metrics, Diagnostics(arrays))
    found = measure_model(module, source, maps=None)
    path.parent.mkdir(exist_ok=True)
    metrics = {METRIC + name: np.array(value) for name, value in found.metrics.items()}
    Diagnostics(found.diagnostics.arrays | metrics).save(path)
    return found


def read_finished(folder: Path) -> RunResult | None:
    """The result of a finished run, or None. Removes checkpoints that a killed process left next to the result."""
    result = RunResult.read(folder)
    if result is not None:
        remove_checkpoints(folder)
    return result
