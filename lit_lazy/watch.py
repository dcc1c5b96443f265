"""What the heads do while a model trains: a few cheap figures of a small fixed batch, at steps that show when."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lit_lazy.data import DataSource
from lit_lazy.diagnostics import listening
from lit_lazy.lightning_module import LitLM
from lit_lazy.metrics import AttentionMetrics
from lit_lazy.metrics.collapse import effective_rank, token_cosine
from lit_lazy.metrics.offsets import taus

NAMES = {
    "sink/first_key_weight": "watch/first_key_weight",
    "sink/first_key_share": "watch/first_key_share",
    "mass/all": "watch/mass",
    "sparsity/zero": "watch/sparsity",
}
"""Names during training of what `AttentionMetrics` calls otherwise: there a number of the whole validation set."""
SEQUENCES = 4


class Watch(Callback):
    """Logs sink, mass, sparsity, tau and the spread of the last hidden states of some validation sequences.

    At steps 0 (the untrained model), 1, 2, 4, 8, ..., and at each validation. Step counts finished optimiser steps.
    """

    def __init__(self, source: DataSource, sequences: int = SEQUENCES) -> None:
        self.batch = source.validation.__getitems__(list(range(min(sequences, len(source.validation)))))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The untrained model; or, after a kill, what was due at the step of the checkpoint: a logger may know it."""
        step = trainer.global_step
        if _is_due(step) or (isinstance(pl_module, LitLM) and step % pl_module.cfg.train.val_every == 0):
            self._log(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_args: object, **_kwargs: object
    ) -> None:
        """Powers of two."""
        if _is_due(trainer.global_step):
            self._log(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Beside the validation's loss."""
        if not _is_due(trainer.global_step):
            self._log(trainer, pl_module)

    def _log(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.logger is not None and isinstance(module, LitLM):
            with trainer.precision_plugin.forward_context():
                measured = look(module, self.batch["tokens"].to(module.device))
            trainer.logger.log_metrics(measured, trainer.global_step)


def _is_due(step: int) -> bool:
    """0 and the powers of two."""
    return step & (step - 1) == 0


@torch.no_grad()
def look(module: LitLM, tokens: Tensor) -> dict[str, float]:
    """The figures of a batch of tokens `[B, L]`, by their names under `watch/`; an undefined one is left out."""
    was_training = module.training
    hidden: dict[int, Tensor] = {}
    try:
        with listening(module.model, on_hidden=hidden.__setitem__):
            _, stats = module.eval().model.forward_with_stats(tokens)
    finally:
        module.train(was_training)
    last = hidden[len(module.model.blocks)].float()
    attention = AttentionMetrics.of(module.cfg.model.attention, device=module.device)
    attention.update(stats, {"all": torch.ones_like(tokens, dtype=torch.bool)})
    measured = {NAMES[name]: value for name, value in attention.compute().items()}
    measured["watch/cosine"] = token_cosine(last).mean().item()
    measured["watch/effective_rank"] = effective_rank(last).mean().item()
    return measured | _taus(module)


def _taus(module: LitLM) -> dict[str, float]:
    tau = taus(module.model)
    if tau is None:
        return {}
    means = {f"watch/tau_layer_{layer}": values.mean().item() for layer, values in enumerate(tau)}
    return means | {"watch/tau_min": tau.min().item(), "watch/tau_max": tau.max().item()}
