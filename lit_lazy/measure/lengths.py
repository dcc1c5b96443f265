"""What becomes of a model at some length: loss by position, keys seen and thresholds, also with a cache that evicts."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from flash_lazy import Rows
from lit_lazy.attention import Eviction
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.data import DataConfig
from lit_lazy.data.base import IGNORED, Batch, DataSource
from lit_lazy.measure.diagnostics import (
    SAMPLE,
    TOKENS_AT_ONCE,
    evaluation_mode,
    include_evicted_keys,
    sample_validation,
    select_first_documents,
)
from lit_lazy.measure.evaluation import NATS_PER_BIT
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.support.checks import require, require_whole

STREAMED = "streamed/"
"""How the names begin of what was measured with a cache that evicts."""


@torch.no_grad()
def loss_by_position(model: DecoderLM, batch: Batch, eviction: Eviction | None = None, n_held: bool = False) -> Tensor:
    """Mean loss in nats at each position, float64 `[T]`, of a batch's `tokens` and `targets` `[B, T]`; NaN without any.

    Of documents that do not see each other, the first of each sequence counts.
    Decoded with a cache: whole where there is no eviction, else token by token once it is full. n_held: thresholds are
    those of the tokens' positions in the text, in place of the cache's. Raises ValueError, in one line, where the model
    cannot serve that.
    """
    tokens, targets = batch["tokens"].to(model.device), select_first_documents(batch)[1].to(model.device)
    cache = model.new_cache(eviction)
    at_once = max(1, TOKENS_AT_ONCE // len(tokens))
    parts = [piece for part in cache[0].split_tokens(tokens) for piece in part.split(at_once, 1)]
    wanted = targets.split([part.shape[1] for part in parts], 1)
    with evaluation_mode(model), include_evicted_keys(model, cache) if n_held else nullcontext():
        nll = [token_nll(model(part, cache), target) for part, target in zip(parts, wanted, strict=True)]
    return torch.cat(nll, 1).double().sum(0) / (targets != IGNORED).sum(0)


@torch.no_grad()
def compute_keys_and_thresholds(
    model: DecoderLM, length: int, eviction: Eviction | None = None
) -> dict[str, np.ndarray]:
    """`n`, the keys that the row at each position sees, int64 `[T]`, and its `theta`, float32 `[layers, H, T]`, if any.

    With a cache that evicts both are those within the cache.
    """
    place = torch.arange(1, length + 1, device=model.device)
    place = place if eviction is None else place.clamp(max=eviction.capacity)
    n = place if model.cfg.attention.window is None else place.clamp(max=model.cfg.attention.window)
    shape = 1, 1, length, 1
    rows = Rows(torch.ones(shape, dtype=torch.bool, device=model.device), n.view(shape).float(), place.view(shape))
    found = [layer.normaliser.theta(rows) for layer in model.attentions]
    thetas = [theta.expand(1, -1, length, 1)[0, ..., 0] for theta in found if theta is not None]
    return {"n": n.cpu().numpy()} | ({"theta": torch.stack(thetas).float().cpu().numpy()} if thetas else {})


def compute_length_arrays(model: DecoderLM, length: int) -> dict[str, np.ndarray]:
    """The arrays `length/n` and `length/theta`."""
    return {f"length/{name}": x for name, x in compute_keys_and_thresholds(model, length).items()}


def compute_streaming_arrays(model: DecoderLM, batch: Batch, eviction: Eviction) -> dict[str, np.ndarray]:
    """The arrays `streamed/loss` float32 `[T]`, nats; `streamed/n`, `streamed/theta`; `streamed/kept` int64 `[2]`.

    kept: the first and the newest tokens in the cache.
    """
    loss = loss_by_position(model, batch, eviction)
    of_rows = compute_keys_and_thresholds(model, len(loss), eviction)
    kept = np.array([eviction.first, eviction.window], np.int64)
    arrays = {"loss": loss.float().cpu().numpy(), "kept": kept} | of_rows
    return {STREAMED + name: x for name, x in arrays.items()}


def compute_length_metrics(arrays: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The metrics that are made of one measurement's arrays, `loss/by_position` among them.

    Of all positions together the perplexity; of those beyond the trained context `perplexity_beyond`, of those that
    see a cache which has evicted `perplexity_evicted`; n and mean theta of the last row.
    """
    context = int(arrays["context"])
    found = {}
    for group, loss in (("length/", arrays["loss/by_position"]), (STREAMED, arrays.get(f"{STREAMED}loss"))):
        if loss is None:
            continue
        parts = {"perplexity": loss, "perplexity_beyond": loss[context:]}
        if group == STREAMED:
            parts["perplexity_evicted"] = loss[int(arrays[f"{STREAMED}kept"].sum()) :]
        there = {name: x[~np.isnan(x)] for name, x in parts.items()}
        found |= {group + name: float(np.exp(x.mean(dtype=np.float64))) for name, x in there.items() if len(x)}
        found[f"{group}n"] = float(arrays[f"{group}n"][-1])
        if (theta := arrays.get(f"{group}theta")) is not None:
            found[f"{group}theta"] = float(theta[..., -1].mean(dtype=np.float64))
    return found


@dataclass(frozen=True)
class Lengths(Evaluation):
    """Loss by position where sequences are some times as long as in training."""

    times: tuple[int, ...] = (1, 2, 4)
    """Lengths, as multiples of the training's context."""
    sequences: int = SAMPLE
    """Of the validation data, spread evenly over them."""

    def __post_init__(self) -> None:
        require(len(self.times) > 0, "Lengths.times", self.times, "needs at least one")
        for times in self.times:
            require_whole("Lengths.times", times, 1)
        require_whole("Lengths.sequences", self.sequences, 1)

    def check(self, model: DecoderLM, data: DataConfig) -> None:
        """Raise ValueError where positions, bias or data do not reach so far."""
        for times in self.times:
            check_reach(model, data, times * model.context_length)

    def measure(self, model: DecoderLM, data: DataConfig) -> dict[str, float]:
        """`length_4x/loss`, nats, `length_4x/loss_last_quarter` of its last quarter; of text bits per byte, too."""
        found = {}
        for times in self.times:
            source = data.at_length(times * model.context_length).load()
            (batch,) = sample_validation(source, self.sequences)
            loss = loss_by_position(model, batch)
            parts = {"loss": loss, "loss_last_quarter": loss[3 * len(loss) // 4 :]}
            found |= make_loss_metrics(f"length_{times}x/", parts, source)
        return found


@dataclass(frozen=True)
class Streaming(Evaluation):
    """Loss of a model whose cache keeps the first and the newest tokens alone, beside that of the whole cache.

    Xiao et al., arXiv 2309.17453. All losses are of the same tokens: those that the smallest cache has evicted some
    before.
    """

    first: tuple[int, ...] = (0, 1, 4)
    """How many of the first tokens are kept, one after the other."""
    window: int = 64
    """Newest tokens kept."""
    times: int = 2
    """Length of the sequences, as a multiple of the training's context."""
    sequences: int = 16
    """Of the validation data, spread evenly over them."""
    n_held: bool = False
    """Measure also with thresholds by position in the text, in place of those by the keys in the cache."""

    def __post_init__(self) -> None:
        require(len(self.first) > 0, "Streaming.first", self.first, "needs at least one")
        for first in self.first:
            require_whole("Streaming.first", first, 0)
        for name in ("window", "times", "sequences"):
            require_whole(f"Streaming.{name}", getattr(self, name), 1)

    def check(self, model: DecoderLM, data: DataConfig) -> None:
        """Raise ValueError where no cache can evict, or none has to."""
        model.new_cache(Eviction(max(self.first), self.window))
        length = self.times * model.context_length
        require(
            max(self.first) + self.window < length,
            "Streaming.window",
            self.window,
            f"must evict within {length} tokens",
        )
        check_reach(model, data, length)

    def measure(self, model: DecoderLM, data: DataConfig) -> dict[str, float]:
        """`streaming/4_and_64/loss` and `loss_excess` over `streaming/whole/loss`, nats; of text bits per byte, too.

        With thresholds by position in the text `streaming/4_and_64_n_held/loss` and `loss_excess`.
        """
        source = data.at_length(self.times * model.context_length).load()
        (batch,) = sample_validation(source, self.sequences)
        after = max(self.first) + self.window
        whole = loss_by_position(model, batch)[after:]
        found = make_loss_metrics("streaming/whole/", {"loss": whole}, source)
        ways = {"": False, "_n_held": True} if self.n_held else {"": False}
        for first, (name, n_held) in product(self.first, ways.items()):
            loss = loss_by_position(model, batch, Eviction(first, self.window), n_held)[after:]
            losses = {"loss": loss, "loss_excess": loss - whole}
            found |= make_loss_metrics(f"streaming/{first}_and_{self.window}{name}/", losses, source)
        return found


def check_reach(model: DecoderLM, data: DataConfig, length: int) -> None:
    """Raise ValueError, in one line, where positions, bias or data do not serve so many tokens."""
    model.check_length(length)
    data.at_length(length).load()


def make_loss_metrics(prefix: str, losses: Mapping[str, Tensor], source: DataSource) -> dict[str, float]:
    """Means of losses by position, nats; where the data are text also in bits per byte."""
    found = {prefix + name: loss.nanmean().item() for name, loss in losses.items()}
    if "bytes_per_token" in source.info:
        nats = NATS_PER_BIT * float(source.info["bytes_per_token"])
        found |= {name.replace("loss", "bits_per_byte"): value / nats for name, value in found.items()}
    return found
