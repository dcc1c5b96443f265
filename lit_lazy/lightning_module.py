"""Loss, optimiser and schedule of a decoder language model."""

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_lazy.attention.normaliser import NormaliserModule
from lit_lazy.config import RunConfig, TrainConfig, from_dict, to_dict
from lit_lazy.errors import UnfinishedError
from lit_lazy.metrics import RatioOfSums
from lit_lazy.model import DecoderLM

Batch = dict[str, Tensor]


class DivergedError(UnfinishedError):
    """The training loss is not finite."""


class LitLM(L.LightningModule):
    """Trains a `DecoderLM` on next-token prediction.

    Hyperparameters are plain dicts, so a checkpoint loads with `weights_only=True`.
    """

    def __init__(self, config: dict[str, Any], vocab_size: int, context_length: int) -> None:
        """config: `to_dict` of a `RunConfig`; the model's vocabulary and context length are the data's."""
        super().__init__()
        self.save_hyperparameters()
        self.cfg: RunConfig = from_dict(RunConfig, config)
        self.model = DecoderLM(self.cfg.model, vocab_size, context_length, self.cfg.seed)
        self.val_loss, self.val_excess = RatioOfSums(), RatioOfSums()

    @classmethod
    def create(cls, cfg: RunConfig, vocab_size: int, context_length: int) -> "LitLM":
        """From a config object."""
        return cls(to_dict(cfg), vocab_size, context_length)

    def training_step(self, batch: Batch, _batch_index: int) -> Tensor:
        loss = token_nll(self.model(batch["tokens"]), batch["targets"]).mean()
        if (self.global_step + 1) % self.cfg.train.log_every == 0:
            if not torch.isfinite(loss):
                raise DivergedError(f"training loss is {loss.item()} at step {self.global_step}")
            self.log("train/loss", loss, prog_bar=True, logger=False)
            if self.logger is not None:
                # At once: Lightning would do so after the checkpoint of this step, and a kill in between would leave a
                # hole in the curve.
                rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
                self.logger.log_metrics({"train/loss": loss.item(), "train/lr": rate}, self.global_step)
        return loss

    def validation_step(self, batch: Batch, _batch_index: int) -> None:
        nll = token_nll(self.model(batch["tokens"]), batch["targets"])
        self.val_loss.update(nll, nll.numel())
        self.log("val/loss", self.val_loss, prog_bar=True)
        if "oracle_nll" in batch:
            self.val_excess.update(nll - batch["oracle_nll"], nll.numel())
            self.log("val/excess", self.val_excess)

    def configure_optimizers(self) -> Any:
        cfg = self.cfg.train
        optimizer = torch.optim.AdamW(parameter_groups(self.model, cfg), lr=cfg.lr, betas=cfg.betas)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, cfg))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood in nats of each target: logits `[B, L, V]`, targets and result `[B, L]`."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def lr_factor(step: int, cfg: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to `final_lr_fraction`; a factor on the peak learning rate."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    progress = (step - cfg.warmup_steps) / (cfg.steps - cfg.warmup_steps)
    return cfg.final_lr_fraction + (1 - cfg.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def parameter_groups(model: DecoderLM, cfg: TrainConfig) -> list[dict[str, Any]]:
    """AdamW's groups: weight matrices of the blocks and an untied head decay; everything else does not.

    Everything else is: embeddings (and a head tied to them), norms, tau, and all parameters of positional biases.
    tau has its normaliser's factor on the learning rate.
    """
    decayed = {id(m.weight) for path, m in model.named_modules() if isinstance(m, nn.Linear) and ".bias" not in path}
    decayed.discard(id(model.embedding.weight))
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    seen: set[int] = set()
    for module in model.modules():
        scale = module.lr_scale if isinstance(module, NormaliserModule) else 1.0
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                decay = cfg.weight_decay if id(parameter) in decayed else 0.0
                groups.setdefault((decay, scale), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay, "lr": cfg.lr * scale}
        for (decay, scale), parameters in groups.items()
    ]
