"""`HeadMonitor`: cheap head metrics of a small fixed batch, logged during training."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from flash_lazy import Stats
from lit_lazy.data import DataSource, compute_learned_nats
from lit_lazy.measure.attention_metrics import AttentionMetrics, count_seen
from lit_lazy.measure.collapse_and_sink_kinds import effective_rank, token_cosine
from lit_lazy.measure.learned_parameters import average_by_head, collect_learned, list_by_head
from lit_lazy.model.cpu_decoder import compute_residual
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.training.callbacks_and_loggers import AtStart
from lit_lazy.training.module import LitLM

NAMES = {
    "sink/first_key_weight": "watch/first_key_weight",
    "sink/first_key_share": "watch/first_key_share",
    "mass/all": "watch/mass",
    "sparsity/zero": "watch/sparsity",
}
"""`AttentionMetrics` name -> name in training; the former is reserved for values on the full validation set."""
SEQUENCES = 4
STATE_KEY = "Watch"
"""Key of the state of `HeadMonitor` in checkpoints of every version."""


History = dict[int, dict[str, Tensor]]
"""Learned parameters, `[layers, H]` or `[layers, 1]`, by step and name."""


class HeadMonitor(AtStart):
    """Logs sink, mass, sparsity, learned parameters and the spread of the last hidden states on some sequences.

    Logs at steps 0 (the untrained model), 1, 2, 4, 8, ..., and at each validation; a step is a finished optimiser step.
    Logged values are means over heads. What every head has learned is stored in the trainer's checkpoints.
    """

    def __init__(self, source: DataSource, sequences: int = SEQUENCES) -> None:
        self.batch = source.validation.__getitems__(list(range(min(sequences, len(source.validation)))))
        self.learned_nats = compute_learned_nats(source.info)
        self.learned: History = {}
        self.losses: dict[int, float] = {}
        """Validation losses in nats by step."""

    state_key = STATE_KEY  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {"learned": self.learned, "losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.learned = read_history(state_dict)
        self.losses.update(state_dict.get("losses", {}))  # missing in checkpoints of earlier versions

    def get_intermediate_losses(self, steps: int) -> dict[str, float]:
        """`loss/at_25`, `loss/at_50` and `loss/at_75`: losses after 25, 50 and 75 % of the steps, if validated then."""
        found = {f"loss/at_{percent}": self.losses.get(steps * percent // 100) for percent in (25, 50, 75)}
        return {name: loss for name, loss in found.items() if loss is not None}

    def find_steps_to_learn(self, steps: int) -> dict[str, float]:
        """`steps/to_learn`: the first step whose validation shows the task learned, all `steps` if none does.

        Empty for a source that does not say what learning is.
        """
        if self.learned_nats is None:
            return {}
        learned = [step for step, loss in self.losses.items() if loss < self.learned_nats]
        return {"steps/to_learn": float(min(learned, default=steps))}

    def on_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Log the untrained model or, after a kill, the step of the checkpoint if it was due."""
        step = trainer.global_step
        if _is_due(step) or (isinstance(module, LitLM) and step % module.cfg.train.val_every == 0):
            self._log_figures(trainer, module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_args: object, **_kwargs: object
    ) -> None:
        if _is_due(trainer.global_step):
            self._log_figures(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.losses[trainer.global_step] = trainer.callback_metrics["val/loss"].item()
        if not _is_due(trainer.global_step):
            self._log_figures(trainer, pl_module)

    def _log_figures(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not isinstance(module, LitLM):
            return
        with module.average.swap_in():
            if learned := collect_learned(module.model):
                former = next(iter(self.learned.values()), None)  # which an earlier version may have begun
                wide = {name for name, values in (former or {}).items() if values.shape[1] > 1}
                by_head = list_by_head(module.model) if former is None else wide
                means = {name: average_by_head(x, name in by_head).cpu() for name, x in learned.items()}
                self.learned[trainer.global_step] = means
            if trainer.logger is None and trainer.world_size == 1:
                return  # with more ranks FSDP needs all of them in the forward pass, also without a logger
            with trainer.precision_plugin.forward_context():
                batch = {name: value.to(module.device) for name, value in self.batch.items()}
                measured = measure_batch(module.model, batch["tokens"], batch.get("place"))
            if trainer.logger is not None:
                trainer.logger.log_metrics(measured, trainer.global_step)


def read_history(state: Mapping[str, Any]) -> History:
    """What a state of `HeadMonitor` has of learned parameters; of earlier versions only tau. Raises ValueError."""
    found = state.get("learned") or {step: {"tau": tau} for step, tau in state.get("taus", {}).items()}
    shapes = {tuple((name, tuple(value.shape)) for name, value in step.items()) for step in found.values()}
    if len(shapes) > 1 or any(len(shape) != 2 for step in shapes for _, shape in step):
        raise ValueError("the learned parameters of its steps have several shapes")
    return {int(step): dict(values) for step, values in found.items()}


def make_history_arrays(history: History) -> dict[str, np.ndarray]:
    """Diagnostics arrays of what a training's heads have learned by step; empty without learned parameters."""
    if not history:
        return {}
    steps = sorted(history)
    stacked = {name: torch.stack([history[step][name] for step in steps]) for name in history[steps[0]]}
    by_step = {f"watch/{name}": values.numpy().astype(np.float32) for name, values in stacked.items()}
    return {"watch/step": np.array(steps, np.int64), **by_step}


def _is_due(step: int) -> bool:
    """Whether a step is 0 or a power of two."""
    return step & (step - 1) == 0


@torch.no_grad()
def measure_batch(model: DecoderLM, tokens: Tensor, place: Tensor | None = None) -> dict[str, float]:
    """Metrics `watch/...` of a batch of tokens `[B, L]`, without undefined ones. place: as in `DecoderLM.forward`."""
    was_training = model.training
    try:
        last, stats = compute_residual(model.eval(), tokens, place, with_stats=True)
    finally:
        model.train(was_training)
    attention = AttentionMetrics(model.attentions)
    attention.update(stats, {"all": torch.ones_like(tokens, dtype=torch.bool)}, place)
    measured = {NAMES[name]: value for name, value in attention.compute().items()}
    measured["watch/cosine"] = token_cosine(last.float()).mean().item()
    measured["watch/effective_rank"] = effective_rank(last.float()).mean().item()
    position = torch.arange(tokens.shape[1], device=tokens.device)[None] if place is None else place
    measured |= _compute_mass_metrics(stats, [count_seen(layer, position) for layer in model.attentions], position)
    for name, values in collect_learned(model).items():
        measured |= {f"watch/{name}_layer_{layer}": value.mean().item() for layer, value in enumerate(values)}
        if values[0].numel() > 1:  # a layer's only number is also its minimum and maximum
            measured |= {f"watch/{name}_min": values.min().item(), f"watch/{name}_max": values.max().item()}
    return measured


def _compute_mass_metrics(stats: Sequence[Stats], seen: Sequence[Tensor], position: Tensor) -> dict[str, float]:
    """Surviving mass by layer and by quarter of the positions; shares of rows and heads whose weights are all 0.

    seen: keys that each row sees, `[B or 1, 1, L]` for each layer; position `[B or 1, L]` from 0 in its document.
    """
    if not stats:
        return {}
    mass = torch.stack([layer.mass for layer in stats]).double()  # [layers, B, H, L]
    empty = torch.stack([layer.zeros >= n for layer, n in zip(stats, seen, strict=True)])
    dead = (empty | (position == 0)[:, None]).all(3).all(1)  # a first row sees one key, whose weight is 1 - tau
    quarters = {f"watch/mass_quarter_{i}": part.mean() for i, part in enumerate(mass.tensor_split(4, -1), start=1)}
    several = enumerate(mass) if len(mass) > 1 else ()  # a single layer's mass is `watch/mass`
    found = {f"watch/mass_layer_{layer}": values.mean() for layer, values in several} | quarters
    found |= {"watch/empty_rows": empty.double().mean(), "watch/dead_heads": dead.double().mean()}
    return {name: value.item() for name, value in found.items() if not value.isnan()}
