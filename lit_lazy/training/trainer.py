"""Lightning's trainer, set up so that a resumed run is bit-identical.

As a program, the process of a rank other than 0: it trains on its share of a run's batches.
"""

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.config.user_files import load_module
from lit_lazy.data import DataSource
from lit_lazy.data.sampler import Portion, train_loader, validation_loader
from lit_lazy.data.source_interface import load_data
from lit_lazy.model.decoder import gather_full_tensor
from lit_lazy.support.error_messages import UnfinishedError
from lit_lazy.training.callbacks_and_loggers import MissedValidation
from lit_lazy.training.checkpoints import AtomicCheckpointIO, load_matching_weights
from lit_lazy.training.execution_settings import Execution
from lit_lazy.training.head_monitor import HeadMonitor
from lit_lazy.training.interrupts import Interrupts, StopOnInterrupt
from lit_lazy.training.module import LitLM
from lit_lazy.training.ranks import GroupEnvironment, RankGroup, exit_on_eof, join_torchrun
from lit_lazy.training.run_folder import CHECKPOINTS, LAST

log = logging.getLogger("lit_lazy.training.trainer")


def build_module(cfg: RunConfig, source: DataSource, execution: Execution) -> LitLM:
    """The module to train, with its initial weights."""
    module = LitLM.create(cfg, source.vocab_size, source.context_length)
    if cfg.init_from is not None:
        log.info("%s", load_matching_weights(module, Path(cfg.init_from)))
        module.apply_schedules(0)
    module.set_execution(execution)
    return module


def fit(
    module: LitLM,
    source: DataSource,
    folder: Path,
    logger: Logger | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: Path | str | None = None,
    final: Path | str | None = None,
    group: RankGroup | None = None,
    interrupts: Interrupts | None = None,
) -> LitLM:
    """Train, resuming from `checkpoint` and together with the other ranks of `group`, if given.

    Returns the trained module; with sharded parameters only rank 0's is complete. final: path to save it at.
    interrupts: as of `run`. Raises KeyboardInterrupt if an interrupt ends it, which Lightning turns into SystemExit.
    """
    interrupts = interrupts or Interrupts()
    stop = StopOnInterrupt(interrupts, folder / CHECKPOINTS / LAST, group)
    trainer = _make_trainer(module, folder, logger, [*callbacks, stop], group)
    batch_size, share = module.cfg.train.batch_size, Portion(trainer.global_rank, trainer.world_size, module.parts)
    # The loader reads global_step at its first batch, after the checkpoint was restored.
    batches = train_loader(source, batch_size, module.cfg.seed, lambda: module.trainer.global_step, share)
    validation = validation_loader(source, module.execution.evaluation_batch_size(batch_size))
    try:
        with interrupts.defer(), nullcontext() if group is None else group.join():
            trainer.fit(module, batches, validation, ckpt_path=checkpoint, weights_only=True)
            if module.cfg.train.steps % module.cfg.train.checkpoint_every:
                trainer.save_checkpoint(folder / CHECKPOINTS / LAST)  # so that an end in the evaluation repeats no step
            module.average.apply()
            if final:
                trainer.save_checkpoint(final)
            if module.execution.strategy == "ddp":
                return module
            state = trainer.strategy.lightning_module_state_dict()
            gathered = LitLM.create(module.cfg, source.vocab_size, source.context_length)
            gathered.set_execution(module.execution)
            if trainer.is_global_zero:
                gathered.load_state_dict(state)
            return gathered
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        interrupts.set_handlers()


def _make_trainer(
    module: LitLM, folder: Path, logger: Logger | None, callbacks: Sequence[Callback], group: RankGroup | None
) -> L.Trainer:
    """Lightning's trainer, with every option that affects results set explicitly.

    The grid handles batch systems. By default, Lightning would take over inside a SLURM job, requeue it on a signal
    and resume from any `hpc_ckpt_*` in its default folder; that folder therefore does not exist.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Data is in memory and indexed by batch, so loader processes would only add overhead.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated.*")  # Lightning's own
    # A resumed run's loader starts at the global step (StepBatchSampler).
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
    train, execution = module.cfg.train, module.execution
    every = train.checkpoint_every
    checkpoint = ModelCheckpoint(
        folder / CHECKPOINTS,
        save_last=True,
        save_top_k=0,
        every_n_train_steps=every,
        enable_version_counter=False,  # otherwise a file that another process wrote would stay the one to resume from
    )
    strategy: Strategy | str = "auto"
    if group:
        strategy = DDPStrategy() if execution.strategy == "ddp" else ShardedStrategy(execution.devices)
    return L.Trainer(
        max_steps=train.steps,
        max_epochs=-1,
        devices=group.local_size if group else 1,
        num_nodes=group.nodes if group else 1,
        strategy=strategy,
        use_distributed_sampler=False,
        accumulate_grad_batches=module.parts,
        precision="bf16-mixed" if train.precision == "bf16" else "32-true",
        gradient_clip_val=train.clip_norm,
        val_check_interval=train.val_every * module.parts,  # in batches
        check_val_every_n_epoch=None,
        log_every_n_steps=train.log_every,
        num_sanity_val_steps=0,
        deterministic=True,
        logger=logger or False,
        # Never that of a batch system, even if its variables are set.
        plugins=[AtomicCheckpointIO(), GroupEnvironment(group) if group else LightningEnvironment()],
        callbacks=[*callbacks, checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder / "lightning",
    )


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2. Rank 0 writes checkpoints of full tensors in one file, which any execution can resume.

    Lightning's checkpoints number the optimiser's states in another order than the optimiser, and cannot load a tensor
    whose rows do not divide evenly over the devices.
    """

    def __init__(self, devices: int) -> None:
        super().__init__(data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All parameters on rank 0, else {}. A collective: all ranks must call it."""
        assert self.model
        return self._gather_state(self.model.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimiser's full state on rank 0, else {}. A collective: all ranks must call it."""
        return self._gather_state(optimizer.state_dict())

    def _gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        def gather(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            found = gather_full_tensor(value)
            return found.cpu() if self.is_global_zero else None

        gathered = tree_map(gather, state)
        return gathered if self.is_global_zero else {}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load this device's shard of model and optimisers."""
        assert self.model
        content = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        full = content["state_dict"]
        sharded = {name: _shard_tensor(full[name], value) for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(sharded)
        for optimizer, state in zip(self.optimizers, content["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            parts = {
                index: {name: _shard_tensor(value, parameters[index]) for name, value in values.items()}
                for index, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": parts})
        return content


def _shard_tensor(value: Tensor, like: Tensor) -> Tensor:
    """This device's shard of a full tensor, if `like` is sharded and has the same shape."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def join_training(group: RankGroup) -> None:
    """Train what rank 0 sends. Reports an error to rank 0."""
    try:
        _train(group, group.receive_spec())
    except Exception as error:
        group.report_failure(error)
        raise


def _train(group: RankGroup, spec: Mapping[str, Any]) -> None:
    for file in spec["files"]:  # which define classes of the config
        load_module(Path(file))
    cfg, execution = from_dict(RunConfig, spec["config"]), Execution(**spec["execution"])
    source = load_data(cfg.data)
    if source.fingerprint != spec["fingerprint"]:
        raise ValueError(f"its data ({source.name}) differs from rank 0's; give it the same files")
    logger, callbacks = None, ()
    if execution.strategy == "fsdp":  # rank 0's callbacks run forward passes, in which all ranks must take part
        logger, monitor = DummyLogger(), HeadMonitor(source)
        callbacks = (MissedValidation(source, monitor.losses), monitor)
    module = build_module(cfg, source, execution)
    with Interrupts() as interrupts, interrupts.allow():  # torchrun sends its signals to every rank
        where = spec["checkpoint"], spec["final"]
        fit(module, source, Path(spec["folder"]), logger, callbacks, *where, group, interrupts)


def main() -> int:
    """Entry point of the processes that rank 0 starts."""
    exit_on_eof(sys.stdin.fileno())
    try:
        group = join_torchrun()
        assert group
        join_training(group)
    except UnfinishedError:
        return 1  # rank 0 has the same error
    except KeyboardInterrupt:
        return 0  # agreed upon with rank 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
