"""Loss, visible keys and thresholds by position at any length, also with an evicting cache."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from flash_lazy import Rows
from lit_lazy.attention import Eviction
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.data import DataConfig
from lit_lazy.data.source_interface import DataSource
from lit_lazy.data.token_dataset import IGNORED, Batch
from lit_lazy.measure.diagnostic_arrays import pool
from lit_lazy.measure.diagnostics import (
    SAMPLE,
    count_targets,
    evaluation_mode,
    include_evicted_keys,
    limit_tokens,
    load_at_length,
    sample_validation,
    select_first_documents,
)
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.support.checked_fields import Bounds, NonNegativeInt, PositiveInt, require

STREAMED = "streamed/"
"""Prefix of names measured with an evicting cache."""


@torch.no_grad()
def loss_by_position(model: DecoderLM, batch: Batch, eviction: Eviction | None = None, n_held: bool = False) -> Tensor:
    """Mean loss in nats by position, float64 `[T]`, of a batch's `tokens` and `targets` `[B, T]`; NaN without targets.

    Only the first document of each sequence counts if documents do not see each other. Decodes with a cache; with
    eviction, token by token once the cache is full. n_held: use the thresholds of the tokens' positions in the text
    instead of those of the keys in the cache. Raises a one-line ValueError if the model does not support this.
    """
    tokens, targets = batch["tokens"].to(model.device), select_first_documents(batch)[1].to(model.device)
    if eviction is None and not model.position.keeps_rotation(1, tokens.shape[1]):
        # A part of a text would be rotated as a shorter text, so sequences are divided instead.
        rows = max(1, limit_tokens(model) // tokens.shape[1])
        with evaluation_mode(model):
            nll = [token_nll(model(x), y) for x, y in zip(tokens.split(rows), targets.split(rows), strict=True)]
        return torch.cat(nll).double().sum(0) / (targets != IGNORED).sum(0)
    cache = model.new_cache(eviction)
    step = max(1, limit_tokens(model) // len(tokens))
    parts = [piece for part in cache[0].split_tokens(tokens) for piece in part.split(step, 1)]
    target_parts = targets.split([part.shape[1] for part in parts], 1)
    with evaluation_mode(model), include_evicted_keys(model, cache) if n_held else nullcontext():
        nll = [token_nll(model(part, cache), target) for part, target in zip(parts, target_parts, strict=True)]
    return torch.cat(nll, 1).double().sum(0) / (targets != IGNORED).sum(0)


@torch.no_grad()
def compute_length_arrays(model: DecoderLM, length: int, eviction: Eviction | None = None) -> dict[str, np.ndarray]:
    """`length/n`, visible keys of the row at each position, int64 `[T]`, and `length/theta` `[layers, H, T]`, if any.

    n is that of the layer that sees most. With an evicting cache, `streamed/n` and `streamed/theta`, within the cache.
    """
    prefix = "length/" if eviction is None else STREAMED
    position = torch.arange(1, length + 1, device=model.device)
    position = position if eviction is None else position.clamp(max=eviction.capacity)
    n = [position.clamp(max=layer.window or length) for layer in model.attentions]
    visible, shape = torch.ones(1, 1, length, 1, dtype=torch.bool, device=model.device), (1, 1, length, 1)
    rows = [Rows(visible, keys.view(shape).float(), position.view(shape)) for keys in n]
    by_layer = [layer.normaliser.theta(seen) for layer, seen in zip(model.attentions, rows, strict=True)]
    thetas = [theta.expand(1, -1, length, 1)[0, ..., 0] for theta in by_layer if theta is not None]
    arrays = {f"{prefix}n": torch.stack(n or [position]).amax(0).cpu().numpy()}
    return arrays | ({f"{prefix}theta": torch.stack(thetas).float().cpu().numpy()} if thetas else {})


def compute_streaming_arrays(model: DecoderLM, batch: Batch, eviction: Eviction) -> dict[str, np.ndarray]:
    """The arrays `streamed/loss` float32 `[T]`, nats; `streamed/n`, `streamed/theta`; `streamed/kept` int64 `[2]`.

    kept: numbers of first and of newest tokens in the cache.
    """
    loss = loss_by_position(model, batch, eviction)
    kept = np.array([eviction.first, eviction.window], np.int64)
    arrays = {f"{STREAMED}loss": loss.float().cpu().numpy(), f"{STREAMED}kept": kept}
    return arrays | compute_length_arrays(model, len(loss), eviction)


def compute_length_metrics(arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metrics of one measurement's arrays, including `loss/by_position` and `loss/target_count`.

    `perplexity` over all positions, `perplexity_beyond` over those beyond the trained context, `perplexity_evicted`
    over those after the first eviction; `n` and mean `theta` of the last row.
    """
    counts = arrays["loss/target_count"].astype(np.float64)
    found = {}
    for group, loss in (("length/", arrays["loss/by_position"]), (STREAMED, arrays.get(f"{STREAMED}loss"))):
        if loss is None:
            continue
        starts = {"perplexity": 0, "perplexity_beyond": int(arrays["context"])}
        if group == STREAMED:
            starts["perplexity_evicted"] = int(arrays[f"{STREAMED}kept"].sum())
        for name, start in starts.items():
            if counts[start:].any():
                found[group + name] = float(np.exp(pool(loss[start:], counts[start:])))
        found[f"{group}n"] = float(arrays[f"{group}n"][-1])
        if (theta := arrays.get(f"{group}theta")) is not None:
            found[f"{group}theta"] = float(theta[..., -1].mean(dtype=np.float64))
    return found


@dataclass(frozen=True)
class Lengths(Evaluation):
    """Loss on sequences longer than in training."""

    times: Annotated[tuple[PositiveInt, ...], Bounds(min_length=1)] = (1, 2, 4)
    """Lengths as multiples of the training's context."""
    sequences: PositiveInt = SAMPLE
    """Number of evenly spaced validation sequences."""

    def check(self, model: DecoderLM, data: DataConfig) -> None:
        """Raises ValueError if positions, bias or data do not support the longest length."""
        for times in self.times:
            load_at_length(model, data, times * model.context_length)

    def measure(self, model: DecoderLM, data: DataConfig) -> dict[str, float]:
        """`length_4x/loss` and `length_4x/loss_last_quarter` and so on in nats; for text also bits per byte."""
        found = {}
        for times in self.times:
            source = load_at_length(model, data, times * model.context_length)
            (batch,) = sample_validation(source, self.sequences)
            loss, late = loss_by_position(model, batch), 3 * source.context_length // 4
            counts = count_targets(batch).to(loss.device)
            parts = {"loss": pool(loss, counts), "loss_last_quarter": pool(loss[late:], counts[late:])}
            found |= make_loss_metrics(f"length_{times}x/", parts, source)
        return found


@dataclass(frozen=True)
class Streaming(Evaluation):
    """Loss with a cache of only the first and the newest tokens, compared with the full cache.

    Xiao et al., arXiv 2309.17453. All losses are over the same tokens, those after the largest cache's first eviction.
    """

    first: Annotated[tuple[NonNegativeInt, ...], Bounds(min_length=1)] = (0, 1, 4)
    """Numbers of first tokens to cache, measured one after the other."""
    window: PositiveInt = 64
    """Number of newest tokens to cache."""
    times: PositiveInt = 2
    """Length of the sequences as a multiple of the training's context."""
    length: PositiveInt | None = None
    """Length of the sequences in tokens instead; None for `times` contexts."""
    sequences: PositiveInt = 16
    """Number of evenly spaced validation sequences."""
    n_held: bool = False
    """Also measure with thresholds by position in the text instead of by the keys in the cache."""

    def __post_init__(self) -> None:
        fix = f"has no effect with Streaming.length={self.length}; leave it at {Streaming.times}"
        require(self.length is None or self.times == Streaming.times, "Streaming.times", self.times, fix)

    def check(self, model: DecoderLM, data: DataConfig) -> None:
        """Raises ValueError if the model does not support eviction, or the sequences are too short for it."""
        model.new_cache(Eviction(max(self.first), self.window))
        length = self._find_length(model)
        evicts = max(self.first) + self.window < length
        require(evicts, "Streaming.window", self.window, f"must evict within {length} tokens")
        load_at_length(model, data, length)

    def measure(self, model: DecoderLM, data: DataConfig) -> dict[str, float]:
        """`streaming/4_and_64/loss` and `loss_excess` over `streaming/whole/loss`, nats; for text also bits per byte.

        With n_held also `streaming/4_and_64_n_held/loss` and `loss_excess`.
        """
        source = load_at_length(model, data, self._find_length(model))
        (batch,) = sample_validation(source, self.sequences)
        after = max(self.first) + self.window
        counts = count_targets(batch)[after:].to(model.device)
        full = loss_by_position(model, batch)[after:]
        found = make_loss_metrics("streaming/whole/", {"loss": pool(full, counts)}, source)
        for first, n_held in product(self.first, (False, True)[: 1 + self.n_held]):
            loss = loss_by_position(model, batch, Eviction(first, self.window), n_held)[after:]
            prefix = f"streaming/{first}_and_{self.window}{'_n_held' * n_held}/"
            parts = {"loss": loss, "loss_excess": loss - full}
            found |= make_loss_metrics(prefix, {name: pool(x, counts) for name, x in parts.items()}, source)
        return found

    def _find_length(self, model: DecoderLM) -> int:
        return self.times * model.context_length if self.length is None else self.length


def make_loss_metrics(prefix: str, losses: Mapping[str, Tensor], source: DataSource) -> dict[str, float]:
    """Losses `[]` in nats, for text also in bits per byte."""
    found = {prefix + name: loss.item() for name, loss in losses.items()}
    if "bytes_per_token" in source.info:
        nats = math.log(2) * float(source.info["bytes_per_token"])
        found |= {name.replace("loss", "bits_per_byte"): value / nats for name, value in found.items()}
    return found
