"""What a model measures on a validation set: loss, accuracy, first-key weight, mass, sparsity, tau, sizes."""

import torch
from torch import Tensor

from lit_lazy.config.schema import TrainConfig
from lit_lazy.data import Batch, DataSource
from lit_lazy.data.loader import validation_loader
from lit_lazy.measure.attention import AttentionMetrics
from lit_lazy.measure.diagnostics import Diagnostics, measure, validation_sample
from lit_lazy.measure.ratio import RatioOfSums
from lit_lazy.model.decoder import DecoderLM, flops_per_token
from lit_lazy.model.loss import token_nll

NATS_PER_BIT = 0.6931471805599453


def diagnosed(model: DecoderLM, source: DataSource) -> Diagnostics:
    """The diagnostics without maps."""
    return measure(model, validation_sample(source), maps=None)


@torch.no_grad()
def evaluate(model: DecoderLM, source: DataSource, train: TrainConfig) -> dict[str, float]:
    """Final metrics on the whole validation set, where the model is; undefined ones are left out.

    train: gives the size of a batch and the precision.
    """
    attention = AttentionMetrics.of(model.attentions[0], source.row_groups, model.device)
    losses: dict[str, RatioOfSums] = {}
    was_training = model.training
    model.eval()
    for batch in validation_loader(source, train.batch_size):
        batch = {name: value.to(model.device) for name, value in batch.items()}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=train.precision == "bf16"):
            logits, stats = model.forward_with_stats(batch["tokens"], batch.get("place"))
        _add_losses(losses, logits, batch, source.row_groups)
        rows = {group: batch[group] for group in source.row_groups}
        attention.update(stats, rows or {"all": torch.ones_like(batch["tokens"], dtype=torch.bool)}, batch.get("place"))
    model.train(was_training)
    measured = {name: metric.compute().item() for name, metric in losses.items()}
    if "bytes_per_token" in source.info:
        measured["loss/bits_per_byte"] = measured["loss/val"] / NATS_PER_BIT / float(source.info["bytes_per_token"])
    return measured | attention.compute() | tau_metrics(model)


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


def tau_metrics(model: DecoderLM) -> dict[str, float]:
    """Mean, least and greatest offset parameter over layers, heads (and positions), where there is one."""
    found = [p.detach().flatten() for name, p in model.named_parameters() if name.endswith("normaliser.tau")]
    if not found:
        return {}
    tau = torch.cat(found).double()
    return {"tau/mean": tau.mean().item(), "tau/min": tau.min().item(), "tau/max": tau.max().item()}


def sizes(model: DecoderLM) -> dict[str, float]:
    """Learned parameters, and training FLOPs per token."""
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "model/parameters": float(parameters),
        "model/flops_per_token": float(flops_per_token(model, model.context_length)),
    }
