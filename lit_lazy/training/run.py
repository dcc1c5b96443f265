"""RunConfig -> RunResult: the one function that trains and evaluates a run."""

import json
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from lit_lazy.config.canonical import to_dict
from lit_lazy.config.key import cell_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.data import DataSource
from lit_lazy.measure.diagnostics import Diagnostics, measure, validation_sample
from lit_lazy.measure.evaluation import diagnosed, evaluate, sizes
from lit_lazy.support.checks import require
from lit_lazy.support.disk import quarantine, write_text
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.support.provenance import environment
from lit_lazy.training.checkpoints import resumable_step
from lit_lazy.training.module import DivergedError, LitLM
from lit_lazy.training.prepare import prepare
from lit_lazy.training.result import DIAGNOSTICS, FINAL_CHECKPOINT, RESULT, RunResult
from lit_lazy.training.trainer import MissedValidation, fit, make_trainer
from lit_lazy.training.watch import Watch, tau_history

log = logging.getLogger("lit_lazy.training.run")
CHECKPOINTS = "checkpoints"


class CellBusyError(UnfinishedError):
    """Another process holds the run folder."""


def run(
    cfg: RunConfig,
    folder: Path,
    *,
    logger: Logger | None = None,
    callbacks: Sequence[Callback] = (),
    show_progress: bool = False,
    keep_checkpoint: bool = False,
    expected_key: str | None = None,
) -> RunResult:
    """Train and evaluate `cfg` in `folder`, or resume from the checkpoint that is there, or return the result that is.

    The checkpoints to resume from are removed in the end; keep_checkpoint leaves the trained model in `final.ckpt`.
    The same config, seed and thread count give the same metrics on the same machine bit for bit, also when the run was
    killed and resumed in between. Raises CellBusyError when another process works in the folder, DivergedError when
    the loss is no longer finite, ValueError when the folder belongs to another config, or when code or data changed
    since the cell got its key (expected_key).
    """
    source = prepare(cfg)
    key = cell_key(cfg, source.fingerprint)
    require(
        expected_key in (None, key),
        "cell",
        expected_key,
        f"its code or data have changed since, and it would be {key} now; give the same command again",
    )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            known = finished(folder)
            require(known is None or known.key == key, "folder", str(folder), "holds the result of another config")
            return known or _run(cfg, key, source, folder, logger, callbacks, show_progress, keep_checkpoint)
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
) -> RunResult:
    module = LitLM.create(cfg, source.vocab_size, source.context_length)
    watch = Watch(source)
    trainer = make_trainer(cfg, folder, logger, (MissedValidation(source), watch, *callbacks), show_progress)
    device = trainer.strategy.root_device
    model = module.model.to(device)
    initial, untrained = evaluate(model, source, cfg.train), diagnosed(model, source)

    last = folder / CHECKPOINTS / "last.ckpt"
    for stray in folder.glob("hpc_ckpt_*.ckpt"):
        quarantine(stray, "left by Lightning's own requeueing")
    started, first_step = time.perf_counter(), resumable_step(last, cfg, module)
    if first_step:
        log.info("resumes at step %d of %d, from %s", first_step, cfg.train.steps, last)
    fit(trainer, module, cfg, source, last if first_step else None)
    trained = time.perf_counter()
    if keep_checkpoint:
        trainer.save_checkpoint(folder / FINAL_CHECKPOINT)
    metrics = evaluate(model.to(device), source, cfg.train)  # Lightning may have moved it to the CPU
    if not all(torch.isfinite(torch.tensor(value)) for value in metrics.values()):
        raise DivergedError("the trained model's evaluation is not finite")
    metrics |= {f"init/{name}": value for name, value in initial.items()} | sizes(model)
    measured = Diagnostics.joined({"": measure(model, validation_sample(source)), "init/": untrained})
    diagnostics = Diagnostics(measured.arrays | tau_history(watch.taus))
    diagnostics.save(folder / DIAGNOSTICS)
    metrics |= diagnostics.scalars()

    tokens = (cfg.train.steps - first_step) * cfg.train.batch_size * source.context_length
    result = RunResult(
        key=key,
        config=to_dict(cfg),
        data=source.info,
        metrics=metrics,
        labels={"backend": model.attentions[0].backend_name},
        timings={
            "train_seconds": trained - started,
            "evaluate_seconds": time.perf_counter() - trained,
            "tokens_per_second": tokens / (trained - started),
        },
        environment=environment(),
        fingerprint=source.fingerprint,
    )
    write_text(folder / RESULT, json.dumps(asdict(result), indent=1, sort_keys=True, allow_nan=False))
    _drop_checkpoints(folder)
    return result


def finished(folder: Path) -> RunResult | None:
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
