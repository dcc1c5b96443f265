"""The LightningModule that trains a decoder language model."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_lazy.config.canonical import from_dict, to_dict
from lit_lazy.config.schema import RunConfig
from lit_lazy.data import Batch
from lit_lazy.measure import RatioOfSums
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.training.optimiser import lr_factor, parameter_groups


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
        loss = token_nll(self.model(batch["tokens"], place=batch.get("place")), batch["targets"]).mean()
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
        nll = token_nll(self.model(batch["tokens"], place=batch.get("place")), batch["targets"])
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
