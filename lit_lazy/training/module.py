"""The LightningModule that trains a decoder language model, by itself or with a teacher."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from lit_lazy.config.schema import RunConfig, TrainConfig
from lit_lazy.config.serialisation import from_dict, to_dict
from lit_lazy.config.user_classes import iter_user_classes
from lit_lazy.data import IGNORED, Batch
from lit_lazy.data.sampler import Portion
from lit_lazy.measure.attention_metrics import RatioOfSums
from lit_lazy.measure.evaluation import compute_losses
from lit_lazy.model.cpu_decoder import compute_hidden, compute_mean_loss
from lit_lazy.model.decoder import DecoderLM, gather_full_tensor, sequence_keys
from lit_lazy.model.loss import average_logits, head_nll, head_nll_and_log_z, mean_nll
from lit_lazy.optim.optimisers_schedules_distillation import Distillation, Passes
from lit_lazy.support.checked_fields import require
from lit_lazy.support.error_messages import UnfinishedError
from lit_lazy.training.execution_settings import ONE_DEVICE, Execution
from lit_lazy.training.trained_parameters import build_optimizer, freeze_others, lr_factor
from lit_lazy.training.weight_average import WeightAverage


class Teacher:
    """A trained model that is only read. It is no part of a checkpoint, but built again where a run resumes."""

    def __init__(self, model: DecoderLM, term: Distillation) -> None:
        self.model, self.term = model.eval().requires_grad_(False), term

    def compute_term(
        self, student: DecoderLM, compute_hidden: Callable[[], Tensor], batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """The student's input of the head, by `compute_hidden`, and the term of its pass over `batch`."""
        with self._collect_mixed(student) as own:
            hidden = compute_hidden()
        with torch.no_grad(), self._collect_mixed(self.model) as taught:
            expected = self.model.compute_hidden(batch["tokens"], batch.get("place"))
        pairs = (hidden, student.head.weight), (expected, self.model.head.weight)
        passes = Passes([*zip(own, taught, strict=True)], partial(average_logits, *pairs, batch["targets"]))
        return hidden, self.term.compute(passes)

    @contextmanager
    def _collect_mixed(self, model: DecoderLM) -> Iterator[list[Tensor]]:
        """What each layer's mixer adds in a pass in the block, `[B, L, d_model]`, if the term compares it."""
        found: list[Tensor] = []
        with ExitStack() as hooks:
            for mixer in model.mixers if self.term.reads_attention else []:
                hooks.enter_context(mixer.register_forward_hook(lambda _, __, out: found.append(out[0])))
            yield found


def require_teacher(train: TrainConfig, teacher: DecoderLM, student: DecoderLM) -> None:
    """Raises a one-line ValueError if a training's term cannot compare the two models."""
    if not train.distillation.active:
        return
    name, fix = "train.distillation", "the model of init_from has {}; give a teacher of this model's sizes"
    layers = train.distillation.reads_attention
    for size, differs in {
        f"{len(teacher.head.weight)} words": len(teacher.head.weight) != len(student.head.weight),
        f"{teacher.cfg.n_layers} layers": layers and teacher.cfg.n_layers != student.cfg.n_layers,
        f"width {teacher.cfg.d_model}": layers and teacher.cfg.d_model != student.cfg.d_model,
    }.items():
        require(not differs, name, type(train.distillation).__name__, fix.format(size))
    teacher.check_length(student.context_length)


AVERAGE = "weight_average"
"""Key of the weights' average in a checkpoint."""
SOURCES = "sources"
"""Key of `hash_sources` in a checkpoint."""


def hash_sources(cfg: RunConfig) -> dict[str, Any]:
    """Digests of what a model depends on beside its settings: the code of its custom classes, its tokeniser's file."""
    return {"code": dict(iter_user_classes(cfg.model)), "tokenizer": cfg.data.hash_tokenizer()}


class DivergedError(UnfinishedError):
    """The loss is not finite."""


class LitLM(L.LightningModule):
    """Trains a `DecoderLM` on next-token prediction.

    Hyperparameters are plain dicts, so a checkpoint loads with `weights_only=True`.
    """

    def __init__(self, config: dict[str, Any], vocab_size: int, context_length: int) -> None:
        """config: `to_dict` of a `RunConfig`. vocab_size, context_length: those of the data."""
        super().__init__()
        self.save_hyperparameters()
        self.cfg: RunConfig = from_dict(RunConfig, config)
        self.model = DecoderLM(self.cfg.model, vocab_size, context_length, self.cfg.seed)
        self.frozen = freeze_others(self.model, self.cfg.train.trainable)
        self.average = WeightAverage(self.model, self.cfg.train.ema_decay)
        self.teacher: Teacher | None = None
        self.sources: dict[str, Any] = {}
        self._validating = ExitStack()
        self.val_loss, self.val_excess = (RatioOfSums(sync_on_compute=False) for _ in range(2))
        self.set_execution(ONE_DEVICE)

    @classmethod
    def create(cls, cfg: RunConfig, vocab_size: int, context_length: int) -> "LitLM":
        """Make a module from a config object."""
        return cls(to_dict(cfg), vocab_size, context_length)

    def set_execution(self, execution: Execution) -> None:
        """Use this execution from now on."""
        self.execution, self.parts = execution, execution.accumulation_steps(self.cfg.train.batch_size)
        self.model.checkpoint_activations = execution.checkpoint_activations
        self._hidden = torch.compile(self.model.compute_hidden) if execution.compile else self.model.compute_hidden
        self._is_sharded = False
        self._means: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        """Shard the parameters over the devices for fsdp."""
        if self.execution.strategy == "fsdp" and not self._is_sharded:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index] (set by the strategy)
            for part in (*self.model.blocks, self.model):
                fully_shard(part, mesh=mesh)
            # A method other than `forward` must gather the parameters too, which then stay for norm and head.
            register_fsdp_forward_method(self.model, "compute_residual")
            self._is_sharded = True

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        terms = self.compute_terms(batch, batch_index)
        for name, value in terms.items():
            self._means[name] = self._means.get(name, 0) + value.detach() / self.parts
        loss, *added = terms.values()
        return sum(added, loss)

    def compute_terms(self, batch: Batch, batch_index: int) -> dict[str, Tensor]:
        """The terms of a batch's loss, whose first is the cross-entropy."""
        targets, place, z_loss = batch["targets"], batch.get("place"), self.cfg.train.z_loss
        dropout_keys, added = self._dropout_keys(targets, batch_index), {}
        plain = place is None and dropout_keys is None and not z_loss and self.teacher is None
        if self.execution.is_plain and plain:
            return {"loss": compute_mean_loss(self.model, batch["tokens"], targets)}
        compute_hidden = partial(self._hidden, batch["tokens"], place, dropout_keys)
        if self.teacher is None:
            hidden = compute_hidden()
        else:
            hidden, added["distillation"] = self.teacher.compute_term(self.model, compute_hidden, batch)
        if z_loss:
            nll, log_z = head_nll_and_log_z(hidden, self.model.head.weight, targets)
            added["z_loss"] = z_loss * mean_nll(log_z.square(), targets)
        else:
            nll = head_nll(hidden, self.model.head.weight, targets)
        return {"loss": mean_nll(nll, targets)} | added

    def _dropout_keys(self, targets: Tensor, batch_index: int) -> Tensor | None:
        """Dropout key of each sequence of a micro-batch, independent of how the batch is divided."""
        if not self.cfg.model.residual_dropout:
            return None
        share = Portion(self.global_rank, self.trainer.world_size, self.parts)
        rows = share.own[batch_index % self.parts] + share.n * torch.arange(len(targets), device=targets.device)
        return sequence_keys(self.cfg.seed, self.global_step, rows)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,  # noqa: ARG002
    ) -> None:
        """Clip gradients and log this step. Lightning's own clipping refuses a fused optimiser under bf16.

        Lightning would log after this step's checkpoint; a kill in between would leave a gap in the curve.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = gather_full_tensor(torch.nn.utils.clip_grad_norm_(parameters, gradient_clip_val or torch.inf))
        if (self.global_step + 1) % self.cfg.train.log_every == 0:
            self._log_step(norm)
        self._means = {}

    def _log_step(self, norm: Tensor) -> None:
        """Log the step's terms (means over all devices, so that all of them stop if one diverges), rate and norm.

        The rate is the schedule's, of which parameter groups may have multiples.
        """
        means = {name: self.trainer.strategy.reduce(x, reduce_op="mean") for name, x in self._means.items()}
        loss = means["loss"]
        if not torch.isfinite(loss):
            raise DivergedError(f"training loss is {loss.item()} at step {self.global_step}")
        self.log("train/loss", loss, logger=False)
        if self.logger is not None:
            step = {name: mean.item() for name, mean in means.items()}
            rate = self.cfg.train.lr * lr_factor(self.global_step, self.cfg.train)
            step |= {"lr": rate, "grad_norm": norm.item()}
            self.logger.log_metrics({f"train/{name}": value for name, value in step.items()}, self.global_step)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Also update the average and scheduled parameters, before checkpoints and evaluations at this step."""
        super().optimizer_step(*args, **kwargs)
        self.apply_schedules(self.global_step + 1)  # Lightning counts the step after this method
        self.average.update()

    def apply_schedules(self, step: int) -> None:
        """Set scheduled parameters to their values after `step` finished steps."""
        for attention in self.model.attentions:
            attention.normaliser.at_progress(step / self.cfg.train.steps)

    def on_fit_start(self) -> None:
        self.sources = hash_sources(self.cfg)  # now, since a file may be edited while this trains
        if self.teacher is not None:
            self.teacher.model.to(self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[SOURCES] = self.sources
        if self.average.values:
            checkpoint[AVERAGE] = dict(self.average.values)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.average.restore(checkpoint.get(AVERAGE, {}))
        # Only its steps count. Lightning counts micro-batches, of which this execution may have others in a step, also
        # those of a step that was cut off. This is the state in which it saves at the end of a step:
        loop, step = checkpoint["loops"]["fit_loop"], checkpoint["global_step"]
        last = step * self.parts
        counts = {"ready": last, "started": last, "processed": last, "completed": last - 1}
        loop["epoch_loop.batch_progress"] |= {"total": counts, "current": counts}
        loop["epoch_loop.state_dict"] = {"_batches_that_stepped": step - 1}
        del loop["epoch_loop.val_loop.batch_progress"]

    def on_validation_epoch_start(self) -> None:
        self._validating.enter_context(self.average.swap_in())

    def on_validation_epoch_end(self) -> None:
        self._validating.close()

    def validation_step(self, batch: Batch, _batch_index: int) -> None:
        for name, metric in self.update_validation(batch).items():
            self.log(name, metric)

    def update_validation(self, batch: Batch) -> dict[str, RatioOfSums]:
        """Add a batch to the validation metrics. Returns those that its data defines, by name."""
        hidden, _ = compute_hidden(self.model, batch["tokens"], batch.get("place"))
        losses = compute_losses(self.model, hidden, batch)
        metrics = {"loss": self.val_loss, "excess": self.val_excess}
        for name, values in losses.items():
            metrics[name].update(values, batch["targets"] != IGNORED)
        return {f"val/{name}": metrics[name] for name in losses}

    def configure_optimizers(self) -> Any:
        cfg = self.cfg.train
        optimizer = build_optimizer(self.model, cfg)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, cfg))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
