"""RunConfig -> RunResult: the one function that trains and evaluates a run."""

import functools
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from filelock import FileLock, Timeout
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader

from lit_lazy.checkpoints import AtomicCheckpointIO, resumable_step
from lit_lazy.config import RunConfig, cell_key, to_dict
from lit_lazy.data import DataSource, StepBatchSampler
from lit_lazy.data.base import require
from lit_lazy.diagnostics import Diagnostics, check_normaliser, measure, validation_sample
from lit_lazy.disk import set_aside, write_text
from lit_lazy.errors import UnfinishedError
from lit_lazy.lightning_module import Batch, DivergedError, LitLM, token_nll
from lit_lazy.metrics import AttentionMetrics, RatioOfSums
from lit_lazy.model import check_model, flops_per_token
from lit_lazy.watch import Watch, tau_history

log = logging.getLogger("lit_lazy.run")

RESULT, FINAL_CHECKPOINT, DIAGNOSTICS = "result.json", "final.ckpt", "diagnostics.npz"
NATS_PER_BIT = 0.6931471805599453


class CellBusyError(UnfinishedError):
    """Another process holds the run folder."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run measured. `metrics` is the same for the same key, machine and thread count."""

    key: str
    config: dict[str, Any]
    data: dict[str, str | int | float]
    metrics: dict[str, float]
    """Final values; a metric that is undefined for this variant is absent."""
    labels: dict[str, str]
    timings: dict[str, float]
    """Seconds, and tokens per second of training (of the last leg, if the run was resumed)."""
    environment: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> "RunResult | None":
        """The result in a run folder, or None while there is none. One that cannot be read is set aside."""
        path = folder / RESULT
        if not path.exists():
            return None
        try:
            return cls(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            set_aside(path, f"damaged ({type(error).__name__})")
            return None


def prepare(cfg: RunConfig) -> DataSource:
    """Load a run's data and check that data, model and training fit each other, before anything is created.

    Raises ValueError in one line that names the option.
    """
    source = cfg.data.load()
    require(
        cfg.train.batch_size <= len(source.train),
        "train.batch_size",
        cfg.train.batch_size,
        f"must not exceed the {len(source.train)} training sequences",
    )
    check_model(cfg.model, source.context_length)
    return source


def run(
    cfg: RunConfig,
    folder: Path,
    *,
    logger: Logger | None = None,
    callbacks: Sequence[Callback] = (),
    show_progress: bool = False,
    keep_checkpoint: bool = False,
) -> RunResult:
    """Train and evaluate `cfg` in `folder`, or go on from the checkpoint that is there, or return the result that is.

    The checkpoints to resume from are removed in the end; keep_checkpoint leaves the trained model in `final.ckpt`.
    The same config, seed and thread count give the same metrics on the same machine bit for bit, also when the run was
    killed and resumed in between. Raises CellBusyError when another process works in the folder, DivergedError when
    the loss is no longer finite, ValueError when the folder belongs to another config.
    """
    source = prepare(cfg)
    key = cell_key(cfg, source.fingerprint)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            known = RunResult.read(folder)
            require(known is None or known.key == key, "folder", str(folder), "holds the result of another config")
            return known or _run(cfg, source, folder, logger, callbacks, show_progress, keep_checkpoint)
    except Timeout:
        raise CellBusyError(f"another process works in {folder}") from None


def _run(
    cfg: RunConfig,
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
    initial, untrained = evaluate(module, source, device), diagnosed(module, source)

    checkpoints = folder / "checkpoints"
    last = checkpoints / "last.ckpt"
    started, first_step = time.perf_counter(), resumable_step(last, cfg, module)
    if first_step:
        log.info("goes on at step %d of %d, from %s", first_step, cfg.train.steps, last)
    fit(trainer, module, cfg, source, last if first_step else None)
    trained = time.perf_counter()
    if keep_checkpoint:
        trainer.save_checkpoint(folder / FINAL_CHECKPOINT)
    metrics = evaluate(module, source, device)
    if not all(torch.isfinite(torch.tensor(value)) for value in metrics.values()):
        raise DivergedError("the trained model's evaluation is not finite")
    metrics |= {f"init/{name}": value for name, value in initial.items()} | sizes(module, source)
    if untrained is not None:
        measured = Diagnostics.joined({"": measure(module, validation_sample(source)), "init/": untrained})
        diagnostics = Diagnostics(measured.arrays | tau_history(watch.taus))
        diagnostics.save(folder / DIAGNOSTICS)
        metrics |= diagnostics.scalars()

    tokens = (cfg.train.steps - first_step) * cfg.train.batch_size * source.context_length
    result = RunResult(
        key=cell_key(cfg, source.fingerprint),
        config=to_dict(cfg),
        data=source.info,
        metrics=metrics,
        labels={"backend": module.model.attentions[0].backend_name},
        timings={
            "train_seconds": trained - started,
            "evaluate_seconds": time.perf_counter() - trained,
            "tokens_per_second": tokens / (trained - started),
        },
        environment=environment(),
    )
    write_text(folder / RESULT, json.dumps(asdict(result), indent=1, sort_keys=True, allow_nan=False))
    if checkpoints.exists():
        for aside in checkpoints.glob("*.damaged"):
            aside.replace(folder / aside.name)
        shutil.rmtree(checkpoints)
    return result


def fit(trainer: L.Trainer, module: LitLM, cfg: RunConfig, source: DataSource, checkpoint: Path | None) -> None:
    """Train, from a checkpoint where there is one. Lightning turns Ctrl-C into an exit; here it stays Ctrl-C."""
    on_interrupt = signal.getsignal(signal.SIGINT)
    loaders = train_loader(cfg, source, module), validation_loader(cfg, source)
    try:
        trainer.fit(module, *loaders, ckpt_path=checkpoint, weights_only=True)
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, on_interrupt)


def make_trainer(
    cfg: RunConfig, folder: Path, logger: Logger | None, callbacks: Sequence[Callback], show_progress: bool
) -> L.Trainer:
    """Lightning's trainer with everything that decides a result set explicitly."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # The data is in memory and indexed by batch: loader processes would only cost.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated.*")  # Lightning's own
    # A resumed run's loader starts at the global step by itself (StepBatchSampler).
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    checkpoint = ModelCheckpoint(
        dirpath=folder / "checkpoints",
        save_last=True,
        save_top_k=0,
        every_n_train_steps=cfg.train.checkpoint_every,
    )
    return L.Trainer(
        max_steps=cfg.train.steps,
        max_epochs=-1,
        devices=1,
        precision="bf16-mixed" if cfg.train.precision == "bf16" else "32-true",
        gradient_clip_val=cfg.train.clip_norm,
        val_check_interval=cfg.train.val_every,
        check_val_every_n_epoch=None,
        log_every_n_steps=cfg.train.log_every,
        num_sanity_val_steps=0,
        deterministic=True,
        logger=logger or False,
        plugins=[AtomicCheckpointIO()],
        callbacks=[checkpoint, *callbacks],
        enable_progress_bar=show_progress,
        enable_model_summary=False,
        default_root_dir=folder,
    )


class MissedValidation(Callback):
    """Makes up for a validation that a kill cut off.

    The checkpoint of a step is written before the validation at that step, and Lightning goes on after both.
    """

    def __init__(self, source: DataSource) -> None:
        self.source = source

    @torch.inference_mode()
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log it, if the run goes on from a step of validation; a logger may know it already."""
        module, step = pl_module, trainer.global_step
        if not isinstance(module, LitLM) or trainer.logger is None or not step or step % module.cfg.train.val_every:
            return
        loss, excess = RatioOfSums().to(module.device), RatioOfSums().to(module.device)
        measured = {"val/loss": loss}
        module.eval()
        for batch in validation_loader(module.cfg, self.source):
            batch = {name: value.to(module.device) for name, value in batch.items()}
            with trainer.precision_plugin.forward_context():
                nll = token_nll(module.model(batch["tokens"]), batch["targets"])
            loss.update(nll, nll.numel())
            if "oracle_nll" in batch:
                excess.update(nll - batch["oracle_nll"], nll.numel())
                measured["val/excess"] = excess
        module.train()
        trainer.logger.log_metrics({name: metric.compute().item() for name, metric in measured.items()}, step - 1)


def train_loader(cfg: RunConfig, source: DataSource, module: LitLM) -> DataLoader[Batch]:
    """Batches whose content is a function of (seed, step); after a resume it starts at the restored global step."""
    sampler = StepBatchSampler(
        len(source.train), cfg.train.batch_size, cfg.seed, start_step=lambda: module.trainer.global_step
    )
    return DataLoader(source.train, batch_sampler=sampler, collate_fn=_as_it_is)


def validation_loader(cfg: RunConfig, source: DataSource) -> DataLoader[Batch]:
    """The whole validation set in order."""
    return DataLoader(source.validation, batch_size=cfg.train.batch_size, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def diagnosed(module: LitLM, source: DataSource) -> Diagnostics | None:
    """The diagnostics without maps; None, and said so, where the normaliser does not give its weights."""
    try:
        for attention in module.model.attentions:
            check_normaliser(attention.normaliser)
    except ValueError as error:
        log.warning("diagnostics are left out: %s", error)
        return None
    return measure(module, validation_sample(source), maps=None)


@torch.no_grad()
def evaluate(module: LitLM, source: DataSource, device: torch.device) -> dict[str, float]:
    """Final metrics on the whole validation set; undefined ones are left out."""
    cfg = module.cfg
    attention = AttentionMetrics.of(cfg.model.attention, source.row_groups, device)
    losses: dict[str, RatioOfSums] = {}
    was_training = module.training
    module.to(device).eval()
    for batch in validation_loader(cfg, source):
        batch = {name: value.to(device) for name, value in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=cfg.train.precision == "bf16"):
            logits, stats = module.model.forward_with_stats(batch["tokens"])
        _add_losses(losses, logits, batch, source.row_groups)
        rows = {group: batch[group] for group in source.row_groups}
        attention.update(stats, rows or {"all": torch.ones_like(batch["tokens"], dtype=torch.bool)})
    module.train(was_training)
    measured = {name: metric.compute().item() for name, metric in losses.items()}
    if "bytes_per_token" in source.info:
        measured["loss/bits_per_byte"] = measured["loss/val"] / NATS_PER_BIT / float(source.info["bytes_per_token"])
    return measured | attention.compute() | taus(module)


def _add_losses(losses: dict[str, RatioOfSums], logits: Tensor, batch: Batch, row_groups: tuple[str, ...]) -> None:
    """Loss in nats; where the data knows its oracle, the excess over it per row group, and each group's accuracy."""

    def add(name: str, values: Tensor) -> None:
        losses.setdefault(name, RatioOfSums().to(values.device)).update(values, values.numel())

    nll = token_nll(logits, batch["targets"])
    add("loss/val", nll)
    if "oracle_nll" not in batch:
        return
    excess = nll - batch["oracle_nll"]
    hit = (logits.argmax(-1) == batch["targets"]).double()
    add("loss/excess", excess)
    for group in row_groups:
        add(f"loss/excess_{group}", excess[batch[group]])
        add(f"accuracy/{group}", hit[batch[group]])


def taus(module: LitLM) -> dict[str, float]:
    """Mean, least and greatest offset parameter over layers, heads (and positions), where there is one."""
    found = [p.detach().flatten() for name, p in module.model.named_parameters() if name.endswith("normaliser.tau")]
    if not found:
        return {}
    tau = torch.cat(found).double()
    return {"tau/mean": tau.mean().item(), "tau/min": tau.min().item(), "tau/max": tau.max().item()}


def sizes(module: LitLM, source: DataSource) -> dict[str, float]:
    """Learned parameters, and training FLOPs per token."""
    parameters = sum(p.numel() for p in module.model.parameters() if p.requires_grad)
    return {
        "model/parameters": float(parameters),
        "model/flops_per_token": float(flops_per_token(module.model, source.context_length)),
    }


def environment() -> dict[str, str]:
    """Where and with what a result was made."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "threads": str(torch.get_num_threads()),
        "machine": f"{platform.system()} {platform.machine()} with {device}",
        "git_sha": git_sha(),
    }


@functools.cache
def git_sha() -> str:
    """Read once, at the start of a process: the commit of the code that runs, not of what the checkout became since.

    Short commit of the project's checkout, with `-dirty` where tracked files differ; "unknown" outside one."""
    here = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"],
            cwd=here, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
