"""Everything that is measured of a trained model's heads and hidden states, as arrays: `measure`, `Diagnostics`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_lazy.attention import Attention, AttentionCall, Cache
from lit_lazy.data.base import IGNORED, Batch, DataSource
from lit_lazy.data.sampler import pick_evenly
from lit_lazy.measure.collapse import Collapse, repeated_gap
from lit_lazy.measure.head_metrics import Entropy, GaussianNull, Mass, ScoreSpread, Sink, Sparsity, ValueNorms
from lit_lazy.measure.learned_parameters import collect_taus, compute_bias_curves, fit_alibi
from lit_lazy.measure.row_statistics import summarise
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.support.disk import write_atomically

SAMPLE = 64
"""Sequences that are measured by default."""
TOKENS_AT_ONCE = 8192
"""Tokens of a forward pass, unless a single sequence is longer."""
MOST_MAPS, MAP_ROWS = 4, 128
"""Weight matrices that are kept where none are chosen, and the most rows and keys of each."""
EVICTED = 4
"""Keys that are hidden at most, from the first on."""
N_HELD = -1
"""The last row of the losses: so many keys are hidden, and count in n all the same."""
EVICTION_ROW = 9
"""1-based position from which the loss without the first keys is compared: earlier rows see hardly any other key."""

SCALARS = {
    "sink/rate": ("sink/rate", lambda x: x[..., 0]),
    "sink/rate_share": ("sink/rate_share", lambda x: x[..., 0]),
    "sink/value_norm": ("sink/value_norm", lambda x: x[..., 0]),
    "sink/eviction": ("loss/evicted", lambda x: x[-1]),
    "sink/eviction_n_held": ("loss/evicted_n_held", lambda x: x),
    "mass/empty_rows": ("mass/empty_rows", lambda x: x),
    "mass/dead_heads": ("mass/dead", lambda x: x),
    "sparsity/small": ("sparsity/small", lambda x: x),
    "sparsity/block_64": ("sparsity/block_64", lambda x: x),
    "sparsity/block_128": ("sparsity/block_128", lambda x: x),
    "sparsity/over_null": ("sparsity/over_null", lambda x: x),
    "entropy/keys": ("entropy/keys", lambda x: x),
    "scores/spread": ("scores/spread", lambda x: x),
    "collapse/cosine": ("hidden/cosine", lambda x: x[-1]),
    "collapse/effective_rank": ("hidden/effective_rank", lambda x: x[-1]),
    "collapse/rank_residual": ("hidden/rank_residual", lambda x: x[-1]),
    "collapse/max_abs": ("hidden/max_abs", lambda x: x.max()),
    "collapse/kurtosis": ("hidden/kurtosis", lambda x: x[-1]),
    "collapse/repeated_gap": ("hidden/repeated_gap", lambda x: x[-1]),
    "bias/alibi_distance": ("bias/alibi_distance", lambda x: x),
}
"""Metric of a run: the array it is made of, and the part of it that is averaged, over layers and heads."""


@dataclass(frozen=True)
class Diagnostics:
    """Arrays by name, float32 unless said, of n sequences of T tokens, K = min(8, T).

    Of a model without attention those of heads, biases, evicted keys and maps are absent.

    `[layers, H, ...]`, as their metrics define them: `sink/*` (`Sink`, `ValueNorms`), `mass/*` (`Mass`), `sparsity/*`
    (`Sparsity`, `GaussianNull`), `scores/spread` (`ScoreSpread`), `entropy/*` (`Entropy`).
    `[layers + 1]`, of the residual stream after the embedding and after each block: `hidden/*` (`Collapse`, and
    `hidden/repeated_gap`, the mean of `repeated_gap` over the sequences that are one document, NaN without any).
    `tau` `[layers, H]` or `[layers, H, N]`, `bias/curve` `[layers, H, T]` by distance, `bias/alibi_slope` and
    `bias/alibi_distance` `[layers, H]` (`alibi_fit`): absent where there is none.
    `watch/tau` `[S, layers, H]`: tau at the S steps `watch/step` (int64) of the training, of per_token the mean over
    positions; absent where there is none, or no training was seen.
    `loss/by_position` `[T]`, nats, NaN where nothing is predicted. `loss/evicted` `[4]`: what the loss rises by over
    the rows from position 9 on, in nats, when the first 1 to 4 keys are hidden in every layer;
    `loss/evicted_n_held` `[]`: the same of 4 keys where n, and with it theta, stays as it was.
    `maps/weights` float16 `[S, n, n]`: weights of the first sequence (of that with the longest first document), NaN at
    hidden keys, first n = min(T, 128) rows (those of the document);
    `maps/heads` int64 `[S, 2]`: layer and head of each, from 0.
    `sample` int64 `[3]`: n, T, layers. `context` int64 `[]`: the context length of the training.
    `length/*` and `streamed/*` are those of `lit_lazy.measure.lengths`; only `lit-lazy diagnose` makes them.
    Names that begin with `init/` are those of the same model before training, with `L<length>/` at another length.
    """

    arrays: dict[str, np.ndarray]

    @classmethod
    def merge(cls, parts: Mapping[str, "Diagnostics"]) -> "Diagnostics":
        """Several measurements as one: the arrays of each with its prefix before their names."""
        return cls({prefix + name: x for prefix, part in parts.items() for name, x in part.arrays.items()})

    @classmethod
    def load(cls, file: Path | BinaryIO) -> "Diagnostics":
        """From an npz file. Runs no code that the file holds."""
        with np.load(file, allow_pickle=False) as archive:
            return cls({name: archive[name] for name in archive.files})

    def save(self, path: Path) -> None:
        """Write an npz file, whole or not at all."""
        # The names of the arrays are no identifiers, so numpy's keyword arguments are given as a dict.
        contents: dict[str, Any] = self.arrays
        write_atomically(path, lambda file: np.savez_compressed(file, allow_pickle=False, **contents))

    @property
    def prefixes(self) -> list[str]:
        """Of the measurements in it, in order: "", "init/", "L1024/", ..."""
        return [name.removesuffix("sample") for name in self.arrays if name.split("/")[-1] == "sample"]

    def scalars(self) -> dict[str, float]:
        """The metrics of a run that are made of these arrays: the finite ones, under their measurement's prefix."""
        found = {}
        for prefix in self.prefixes:
            for name, (source, part) in SCALARS.items():
                if (array := self.arrays.get(prefix + source)) is not None:
                    found[prefix + name] = _nanmean(part(array))
        return {name: value for name, value in found.items() if np.isfinite(value)}


def _nanmean(values: np.ndarray) -> float:
    """In fp64, over the heads where it is defined; NaN where there is none."""
    defined = np.asarray(values, np.float64)[~np.isnan(values)]
    return float(defined.mean()) if defined.size else float("nan")


class Maps(NamedTuple):
    """The heads whose weight matrices are kept: every one of `heads` in every one of `layers`, both from 0.

    None for the layers: up to four, evenly spread. None for the heads: in each layer the one that gives the first key
    the greatest share of its mass, or weight where a share means nothing.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def check(self, model: DecoderLM, option: str = "Maps.") -> None:
        """Raise ValueError, in one line, where the model has no such layer or head. option: what to call them."""
        heads = model.attentions[0].n_heads if model.attentions else 0
        has = {"layers": len(model.attentions), "heads": heads}
        for name, chosen in self._asdict().items():
            if chosen is not None and not model.attentions:
                given = ",".join(map(str, chosen))
                raise ValueError(f"{option}{name} {given}: the model has no attention; leave the option out")
            beyond = [index for index in chosen or () if not 0 <= index < has[name]]
            if beyond:
                raise ValueError(
                    f"{option}{name} {beyond[0]}: the model has {has[name]} of them; choose from 0 to {has[name] - 1}"
                )

    def choose(self, share: np.ndarray) -> list[tuple[int, int]]:
        """Layer and head of each map. share: of the first key, `[layers, H]`."""
        layers = len(share)
        spread = np.linspace(0, layers - 1, min(MOST_MAPS, layers)).round().astype(int).tolist()
        strongest = np.nan_to_num(share, nan=-1.0).argmax(-1)
        return [
            (layer, head)
            for layer in (spread if self.layers is None else self.layers)
            for head in ([int(strongest[layer])] if self.heads is None else self.heads)
        ]


STRONGEST = Maps()
"""In up to four layers, the head with the strongest first key."""


def sample_validation(source: DataSource, sequences: int = SAMPLE) -> list[Batch]:
    """Validation sequences, evenly spread, or all where there are no more."""
    there = len(source.validation)
    return [source.validation.__getitems__(pick_evenly(there, min(sequences, there)).tolist())]


@torch.no_grad()
def measure(
    model: DecoderLM, batches: Iterable[Batch], maps: Maps | None = STRONGEST, sample: int = SAMPLE
) -> Diagnostics:
    """All arrays of a model on the first `sample` sequences of batches, in fp32, where the model is.

    batches: each with `tokens` and `targets`, `[B, T]`, T the same in all. With `place`, of documents that do not see
    each other, the first document of each sequence is measured. maps: the weight matrices to keep; None for none. How
    the sequences are cut into batches changes nothing beyond rounding, and the module is left as it was.
    Raises ValueError, in one line, where the positions or the bias cannot serve T tokens.
    """
    if maps is not None:
        maps.check(model)
    batch = {name: part.to(model.device) for name, part in _take_sequences(batches, sample).items()}
    tokens, (counted, targets) = batch["tokens"], select_first_documents(batch)
    n, length = tokens.shape
    observed = _Accumulator(model, length)
    with evaluation_mode(model):
        for at in range(0, n, max(1, TOKENS_AT_ONCE // length)):
            part = slice(at, at + max(1, TOKENS_AT_ONCE // length))
            observed.add(tokens[part], targets[part], counted[part])
        arrays = observed.arrays()
        if maps is not None and model.attentions:
            weight, share = arrays["sink/weight"][..., 0], arrays["sink/share"][..., 0]
            chosen = maps.choose(np.where(np.isnan(share), weight, share))
            arrays["maps/heads"] = np.array(chosen, np.int64)
            rows = counted.sum(1).tolist()
            longest = rows.index(max(rows))
            arrays["maps/weights"] = _compute_weight_maps(
                model, tokens[[longest], : min(rows[longest], MAP_ROWS)], chosen
            )
    return Diagnostics(arrays)


def select_first_documents(batch: Batch) -> tuple[Tensor, Tensor]:
    """Which tokens are of the document that begins their sequence, bool `[B, T]`, and the targets `[B, T]` of these.

    All where documents are not told apart. Nothing before such a token is hidden from it, and what comes after it
    changes nothing: measured without a mask, it is what it is under one.
    """
    targets = batch["targets"]
    if "place" not in batch:
        return torch.ones_like(targets, dtype=torch.bool), targets
    counted = batch["place"] == torch.arange(targets.shape[1], device=targets.device)
    return counted, targets.masked_fill(~counted, IGNORED)


def _take_sequences(batches: Iterable[Batch], sample: int) -> Batch:
    """What is measured of the first sequences, `[n, T]`."""
    kept: list[Batch] = []
    missing = sample
    for batch in batches:
        kept.append({name: batch[name][:missing] for name in ("tokens", "targets", "place") if name in batch})
        missing -= len(kept[-1]["tokens"])
        if missing <= 0:
            break
    if not kept:
        raise ValueError("batches: there is none; give at least one sequence")
    return {name: torch.cat([batch[name] for batch in kept]) for name in kept[0]}


@contextmanager
def evaluation_mode(model: DecoderLM) -> Iterator[None]:
    """Evaluation mode, fp32, and the backend that takes a key mask; everything as it was in the end."""
    modes = [(part, part.training) for part in model.modules()]
    backends = [(attention, attention.backend) for attention in model.attentions]
    model.eval()
    for attention, _ in backends:
        attention.backend = "auto"
    try:
        with torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for part, training in modes:
            part.training = training
        for attention, backend in backends:
            attention.backend = backend


@contextmanager
def include_evicted_keys(model: DecoderLM, cache: Sequence[Cache] | None = None) -> Iterator[None]:
    """Let n and positions, of which thresholds are made, count keys that are hidden, and those evicted from a cache."""

    def count(layer: int, args: Any) -> tuple[AttentionCall]:
        return (args[0]._replace(evicted=0 if cache is None else cache[layer].evicted),)

    hooks = [
        attention.normaliser.register_forward_pre_hook(lambda _, args, layer=layer: count(layer, args))
        for layer, attention in enumerate(model.attentions)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


OnAttention = Callable[[int, Attention, AttentionCall], None]
OnHidden = Callable[[int, Tensor], None]


@contextmanager
def hook_layers(
    model: DecoderLM, on_attention: OnAttention | None = None, on_hidden: OnHidden | None = None
) -> Iterator[None]:
    """Report what each layer asks of its normaliser, and the residual stream `[B, T, d]`, until the end or an error.

    The residual stream is 0 after the embedding and l after block l.
    """
    hooks = []
    try:
        if on_attention is not None:
            for layer, attention in enumerate(model.attentions):

                def attend(_: object, args: Any, layer: int = layer, attention: Attention = attention) -> None:
                    on_attention(layer, attention, args[0])

                hooks.append(attention.normaliser.register_forward_pre_hook(attend))
        if on_hidden is not None:
            for index, reader in enumerate((*model.blocks, model.norm)):

                def read(_: object, args: Any, index: int = index) -> None:
                    on_hidden(index, args[0])

                hooks.append(reader.register_forward_pre_hook(read))
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Accumulator:
    """What is added up over the sequences of a sample, each of T tokens."""

    def __init__(self, model: DecoderLM, length: int) -> None:
        self.model, self.length = model, length
        self.n_layers = len(self.model.blocks)
        device = model.device
        of_heads = (Sparsity, Entropy, ScoreSpread, GaussianNull)
        heads = [attention.n_heads for attention in model.attentions]
        self.rows = [[Sink(n, length), Mass(n, length), *(metric(n) for metric in of_heads)] for n in heads]
        self.values = [ValueNorms(n, length) for n in heads]
        self.evicted = EVICTED if model.attentions else 0
        self.hidden = [Collapse() for _ in range(self.n_layers + 1)]
        for metric in chain(*self.rows, self.values, self.hidden):
            metric.to(device)
        wide = {"dtype": torch.float64, "device": device}
        self.gap = torch.zeros(self.n_layers + 1, **wide)
        self.nll = torch.zeros(2 + self.evicted if self.evicted else 1, length, **wide)
        self.predicted = torch.zeros(length, **wide)
        self.sequences = self.whole = 0

    def add(self, tokens: Tensor, targets: Tensor, counted: Tensor) -> None:
        """Measure sequences `[B, T]`. counted: bool `[B, T]`, the tokens that are looked at, from each first one on."""
        self.sequences += len(tokens)
        self.predicted += (targets != IGNORED).sum(0)
        last: list[Tensor] = []

        def on_attention(layer: int, attention: Attention, call: AttentionCall) -> None:
            summary = summarise(attention.normaliser, call._replace(key_mask=None), counted=counted)
            for metric in self.rows[layer]:
                metric.update(summary)
            self.values[layer].update(call.v, counted)

        def on_hidden(index: int, x: Tensor) -> None:
            self.hidden[index].update(x, counted)
            last.append(x[:, -2:-1].clone())

        with hook_layers(self.model, on_attention, on_hidden):
            self._add_loss(tokens, targets, 0, 0)
        for evicted in range(1, self.evicted + 1):
            self._add_loss(tokens, targets, evicted, evicted)
        if self.evicted:
            with include_evicted_keys(self.model):
                self._add_loss(tokens, targets, self.evicted, N_HELD)
        self._add_repeated_gap(tokens, last, counted.all(1))

    def _add_loss(self, tokens: Tensor, targets: Tensor, evicted: int, row: int) -> None:
        """By position, with the first keys hidden, to a row of the losses. The implementation is the same for none."""
        seen = None
        if self.evicted:
            seen = torch.ones_like(tokens, dtype=torch.bool)
            seen[:, :evicted] = False
        nll = token_nll(self.model(tokens, key_mask=seen), targets)
        self.nll[row] += nll.double().sum(0)

    def _add_repeated_gap(self, tokens: Tensor, last: list[Tensor], whole: Tensor) -> None:
        """The whole sequences without their last token, against themselves with the one before it repeated.

        whole: bool `[B]`. Positions and biases need to serve no more than T tokens.
        """
        self.whole += int(whole.sum())

        def on_hidden(index: int, x: Tensor) -> None:
            self.gap[index] += repeated_gap(last[index], x[:, -2:])[whole].sum()

        with hook_layers(self.model, on_hidden=on_hidden):
            self.model(torch.cat((tokens[:, :-1], tokens[:, -2:-1]), 1))

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays but the maps."""
        per_layer = [*zip(*self.rows, strict=True), self.values, self.hidden]
        found: dict[str, Tensor] = {}
        for metrics in filter(None, per_layer):
            computed = [metric.compute() for metric in metrics]
            found |= {name: torch.stack([values[name] for values in computed]) for name in computed[0]}
        found["hidden/repeated_gap"] = self.gap / self.whole if self.whole else torch.full_like(self.gap, torch.nan)
        by_position = self.nll / self.predicted
        found["loss/by_position"] = by_position[0]
        if self.evicted:
            late = by_position[:, EVICTION_ROW - 1 :]
            there = self.predicted[EVICTION_ROW - 1 :] > 0
            rise = (late[1:] - late[0])[:, there].mean(-1)
            found["loss/evicted"], found["loss/evicted_n_held"] = rise[:-1], rise[-1]
        found |= self._collect_learned()
        arrays = {name: value.cpu().numpy().astype(np.float32) for name, value in found.items()}
        sample = np.array([self.sequences, self.length, self.n_layers], np.int64)
        return arrays | {"sample": sample, "context": np.array(self.model.context_length, np.int64)}

    def _collect_learned(self) -> dict[str, Tensor]:
        """Offset parameters and biases, where there are any."""
        found = {}
        if (tau := collect_taus(self.model)) is not None:
            found["tau"] = tau
        if (curves := compute_bias_curves(self.model, self.length)) is not None:
            found["bias/curve"] = curves
            found["bias/alibi_slope"], found["bias/alibi_distance"] = fit_alibi(curves)
        return found


def _compute_weight_maps(model: DecoderLM, tokens: Tensor, chosen: list[tuple[int, int]]) -> np.ndarray:
    """The weight matrices of one sequence `[1, n]`, float16 `[maps, n, n]`; NaN where a key is hidden."""
    found: dict[tuple[int, int], Tensor] = {}

    def on_attention(layer: int, attention: Attention, call: AttentionCall) -> None:
        if any(layer == at for at, _ in chosen):
            weights = attention.normaliser.compute_weights(call)
            w = weights.w.masked_fill(~weights.rows.visible, torch.nan)[0]
            found.update({(layer, head): w[head] for at, head in chosen if at == layer})

    with hook_layers(model, on_attention):
        model(tokens)
    kept = torch.stack([found[place] for place in chosen]).cpu().numpy()
    # A weight too small for float16 is not to become one that was cut.
    return np.where(kept > 0, np.maximum(kept, np.finfo(np.float16).smallest_subnormal), kept).astype(np.float16)
