"""Loss under int8 weights and activations, which outliers make coarse."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lit_lazy.config.evaluation import Evaluation
from lit_lazy.data import DataConfig
from lit_lazy.data.token_dataset import Batch
from lit_lazy.measure.diagnostics import SAMPLE, evaluation_mode, hook_inputs, iter_parts, sample_validation
from lit_lazy.measure.lengths import make_loss_metrics
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import head_nll, mean_nll
from lit_lazy.support.checked_fields import PositiveInt

LARGEST = 127
"""Largest int8 of a symmetric scale."""


def quantise(x: Tensor, largest: Tensor) -> Tensor:
    """x rounded to whole multiples of largest / 127, and clipped to +- largest `[]`; 0 if largest is 0."""
    scale = (largest / LARGEST).clamp(min=torch.finfo(x.dtype).tiny)
    return (x / scale).round().clamp(-LARGEST, LARGEST) * scale


@contextmanager
def quantise_layers(layers: Sequence[nn.Linear], largest: Sequence[Tensor]) -> Iterator[None]:
    """Quantise the layers' weights and, given their largest absolute values, their inputs; restores the weights."""
    weights = [layer.weight.data for layer in layers]
    inputs = [(layer, partial(quantise, largest=bound)) for layer, bound in zip(layers, largest, strict=False)]
    with hook_inputs(inputs):
        try:
            for layer, weight in zip(layers, weights, strict=True):
                layer.weight.data = quantise(weight, weight.abs().max())
            yield
        finally:
            for layer, weight in zip(layers, weights, strict=True):
                layer.weight.data = weight


@dataclass(frozen=True)
class Int8(Evaluation):
    """Loss with int8 weights and inputs of all linear layers of the blocks, simulated in fp32.

    One symmetric scale per tensor: by the largest absolute weight, and by the largest absolute input in fp32 on the
    same sequences. What this costs is a measure of outliers (Bondarenko et al., arXiv 2306.12929).
    """

    weights_only: bool = False
    """Quantise only the weights; the metrics then begin with `int8_weights/`."""
    sequences: PositiveInt = SAMPLE
    """Number of evenly spaced validation sequences."""

    @torch.no_grad()
    def measure(self, model: DecoderLM, data: DataConfig) -> dict[str, float]:
        """`int8/loss` and its rise over fp32, `int8/loss_rise`, in nats; for text also in bits per byte."""
        source = data.load()
        (batch,) = sample_validation(source, self.sequences)
        # Embedding, head and norms keep their precision.
        layers = [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]
        largest = [torch.zeros_like(layer.weight[0, 0]) for layer in layers]

        def read(index: int, x: Tensor) -> None:
            largest[index] = torch.maximum(largest[index], x.abs().max())

        with evaluation_mode(model):
            with hook_inputs((layer, partial(read, index)) for index, layer in enumerate(layers)):
                exact = compute_mean_loss(model, batch)
            with quantise_layers(layers, () if self.weights_only else largest):
                loss = compute_mean_loss(model, batch)
        prefix = "int8_weights/" if self.weights_only else "int8/"
        return make_loss_metrics(prefix, {"loss": loss, "loss_rise": loss - exact}, source)


def compute_mean_loss(model: DecoderLM, batch: Batch) -> Tensor:
    """Mean loss in nats over the targets of a batch `[B, T]`, fp64 `[]`."""
    losses = []
    for part in iter_parts(model, batch):
        hidden = model.compute_hidden(part["tokens"], part.get("place"))
        losses.append(head_nll(hidden, model.head.weight, part["targets"]).double().cpu())
    return mean_nll(torch.cat(losses), batch["targets"])
