"""`measure`: the arrays of `Diagnostics`, from a model's heads and hidden states."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lit_lazy.attention import Attention, AttentionCall, Cache
from lit_lazy.attention.normaliser import AttentionBackend
from lit_lazy.data.sampler import pick_evenly
from lit_lazy.data.source_interface import DataConfig, DataSource, load_data
from lit_lazy.data.token_dataset import IGNORED, Batch
from lit_lazy.measure.collapse_and_sink_kinds import Collapse, SinkKinds, repeated_gap
from lit_lazy.measure.diagnostic_arrays import Diagnostics, pool
from lit_lazy.measure.head_metrics import Entropy, Mass, Sink, Sparsity, Spread, ValueNorms
from lit_lazy.measure.learned_parameters import collect_learned, compute_bias_curves, fit_alibi
from lit_lazy.measure.row_statistics import RowSummary, summarise
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import LOGITS_AT_ONCE, token_nll
from lit_lazy.support.checked_fields import PositiveInt, check_value, require

SAMPLE = 64
"""Sequences measured by default."""
TOKENS_AT_ONCE = 8192
"""Tokens per forward pass, unless a single sequence is longer or their logits would not fit (`limit_tokens`)."""
MOST_MAPS, MAP_ROWS = 4, 128
"""Default number of weight matrices, and maximum number of rows and keys of each."""
EVICTED = 4
"""Maximum number of first keys that are hidden."""
N_HELD = -1
"""Last row of the losses: EVICTED keys are hidden but still count in n."""
EVICTION_ROW = 9
"""1-based position from which losses without the first keys are compared; earlier rows see hardly any other key."""


class Maps(NamedTuple):
    """Heads whose weight matrices are stored: all `heads` in all `layers`, both from 0.

    layers=None: up to four, evenly spaced. heads=None: in each layer the head with the largest share of its mass on the
    first key, or the largest weight if shares are undefined.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None

    def check(self, model: DecoderLM, option: str = "Maps.") -> None:
        """Raises a one-line ValueError if the model lacks a layer or head. option: prefix of names in the message."""
        sizes = {"layers": len(model.attentions), "heads": model.attentions[0].n_heads if model.attentions else 0}
        for name, chosen in self._asdict().items():
            if chosen is not None and not model.attentions:
                values = ",".join(map(str, chosen))
                raise ValueError(f"{option}{name} {values}: the model has no attention; leave the option out")
            if beyond := [index for index in chosen or () if not 0 <= index < sizes[name]]:
                fix = f"choose from 0 to {sizes[name] - 1}"
                raise ValueError(f"{option}{name} {beyond[0]}: the model has {sizes[name]} {name}; {fix}")

    def choose(self, share: np.ndarray) -> list[tuple[int, int]]:
        """Layer and head of each map. share: the first key's, `[layers, H]`."""
        layers = len(share)
        spread = np.linspace(0, layers - 1, min(MOST_MAPS, layers)).round().astype(int).tolist()
        strongest = np.nan_to_num(share, nan=-1.0).argmax(-1)
        return [
            (layer, head)
            for layer in (spread if self.layers is None else self.layers)
            for head in ([int(strongest[layer])] if self.heads is None else self.heads)
        ]


STRONGEST = Maps()
"""The head with the strongest first key, in up to four layers."""


def sample_validation(source: DataSource, sequences: int = SAMPLE) -> list[Batch]:
    """Up to `sequences` evenly spaced validation sequences, as one batch."""
    check_value("sequences", sequences, PositiveInt)
    total = len(source.validation)
    return [source.validation.__getitems__(pick_evenly(total, min(sequences, total)).tolist())]


def load_for(model: DecoderLM, data: DataConfig, option: str, value: object) -> DataSource:
    """Data to measure a model on. Raises a one-line ValueError if they are wrong, or not as the model reads them.

    option: what was given `value` to have these data in place of the training's.
    """
    source, words = load_data(data), model.embedding.num_embeddings
    model.check_length(source.context_length)
    fix = f"changes the vocabulary size from {words} to {source.vocab_size}"
    require(source.vocab_size == words, option, value, fix)
    return source


def load_at_length(model: DecoderLM, data: DataConfig, length: int) -> DataSource:
    """`load_for` in sequences of `length` tokens."""
    return load_for(model, data.at_length(length), "data.context_length", length)


@torch.no_grad()
def measure(
    model: DecoderLM,
    batches: Iterable[Batch],
    maps: Maps | None = STRONGEST,
    sample: int = SAMPLE,
    advance: Callable[[int], None] = lambda _tokens: None,
) -> Diagnostics:
    """All arrays of a model on the first `sample` sequences of batches, in fp32, on the model's device.

    batches: with `tokens` and `targets`, `[B, T]`, and equal T. With `place` (documents do not see each other), only
    the first document of each sequence is measured. maps: weight matrices to store; None for none. advance: called
    with the number of tokens of each part that was measured. The division into batches has no effect beyond rounding,
    and the model is restored to its former state.
    Raises a one-line ValueError if the positions or the bias do not support T tokens.
    """
    if maps is not None:
        maps.check(model)
    batch = {name: part.to(model.device) for name, part in _take_sequences(batches, sample).items()}
    tokens, (counted, targets) = batch["tokens"], select_first_documents(batch)
    n, length = tokens.shape
    accumulator, step = _Accumulator(model, length), max(1, limit_tokens(model) // length)
    with evaluation_mode(model):
        for part in zip(tokens.split(step), targets.split(step), counted.split(step), strict=True):
            accumulator.add(*part)
            advance(part[0].numel())
        arrays = accumulator.arrays()
        if maps is not None and model.attentions:
            weight, share = arrays["sink/weight"][..., 0], arrays["sink/share"][..., 0]
            chosen = maps.choose(np.where(np.isnan(share), weight, share))
            arrays["maps/heads"] = np.array(chosen, np.int64)
            rows = counted.sum(1).tolist()
            longest = rows.index(max(rows))
            n = min(rows[longest], MAP_ROWS)
            arrays["maps/weights"] = _compute_weight_maps(model, tokens[[longest], :n], chosen)
    return Diagnostics(arrays)


def iter_parts(model: DecoderLM, batch: Batch) -> Iterator[Batch]:
    """Parts of a batch on the model's device, each of at most TOKENS_AT_ONCE tokens or a single sequence."""
    step = max(1, TOKENS_AT_ONCE // batch["tokens"].shape[1])
    for start in range(0, len(batch["tokens"]), step):
        yield {name: x[start : start + step].to(model.device) for name, x in batch.items()}


def limit_tokens(model: DecoderLM) -> int:
    """Tokens whose logits are computed in one pass: fewer if the vocabulary is large."""
    return min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // model.embedding.num_embeddings)


def select_first_documents(batch: Batch) -> tuple[Tensor, Tensor]:
    """Mask `[B, T]` of the tokens in their sequence's first document, and the targets `[B, T]` of these tokens.

    All tokens if documents are not separated. A first document needs no mask: it sees all tokens before it, and later
    tokens do not affect it.
    """
    targets = batch["targets"]
    if "place" not in batch:
        return torch.ones_like(targets, dtype=torch.bool), targets
    counted = batch["place"] == torch.arange(targets.shape[1], device=targets.device)
    return counted, targets.masked_fill(~counted, IGNORED)


def count_targets(batch: Batch) -> Tensor:
    """Targets of first documents by position, float64 `[T]`."""
    return (select_first_documents(batch)[1] != IGNORED).sum(0).double()


def _take_sequences(batches: Iterable[Batch], sample: int) -> Batch:
    """The first `sample` sequences as one batch, `[n, T]`."""
    parts: list[Batch] = []
    for batch in batches:
        parts.append({name: batch[name] for name in ("tokens", "targets", "place") if name in batch})
        if sum(len(part["tokens"]) for part in parts) >= sample:
            break
    if not parts:
        raise ValueError("batches: is empty; give at least one sequence")
    return {name: torch.cat([part[name] for part in parts])[:sample] for name in parts[0]}


@contextmanager
def evaluation_mode(model: DecoderLM) -> Iterator[None]:
    """Evaluation mode, fp32 and a backend that supports key masks in the block; restores the former state."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.autocast(model.device.type, enabled=False), use_backend(model, "auto"):
            yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def use_backend(model: DecoderLM, backend: AttentionBackend) -> Iterator[None]:
    """Another backend of all layers in the block; restores their own."""
    former = [(attention, attention.backend) for attention in model.attentions]
    for attention, _ in former:
        attention.backend = backend
    try:
        yield
    finally:
        for attention, own in former:
            attention.backend = own


def include_evicted_keys(model: DecoderLM, cache: Sequence[Cache] | None = None) -> AbstractContextManager[None]:
    """Count hidden keys, or those evicted from `cache`, in n and in positions, which determine the thresholds."""

    def count(layer: int, call: AttentionCall) -> AttentionCall:
        return call._replace(evicted=0 if cache is None else cache[layer].evicted)

    return hook_inputs((attention.normaliser, partial(count, i)) for i, attention in enumerate(model.attentions))


@contextmanager
def hook_inputs(hooked: Iterable[tuple[nn.Module, Callable[[Any], Any]]]) -> Iterator[None]:
    """Call each function with the first input of its module; what it returns, unless None, replaces that input."""

    def call(function: Callable[[Any], Any], _: object, args: Any) -> tuple[Any] | None:
        found = function(args[0])
        return None if found is None else (found,)

    with ExitStack() as hooks:
        for module, function in hooked:
            hooks.enter_context(module.register_forward_pre_hook(partial(call, function)))
        yield


def hook_layers(
    model: DecoderLM,
    on_attention: Callable[[int, Attention, AttentionCall], None] | None = None,
    on_hidden: Callable[[int, Tensor], None] | None = None,
    on_outputs: Callable[[int, Attention, Tensor], None] | None = None,
) -> AbstractContextManager[None]:
    """Call `on_attention` with each layer's call of its normaliser, and `on_hidden` with the residual stream.

    `on_outputs` gets the outputs of each layer's heads after the gate, `[B, T, H * D]`, which the projection reads.
    The residual stream `[B, T, d]` has index 0 after the embedding and l after block l.
    """
    layers = [*enumerate(model.attentions)]

    def watch(function: Callable[..., None], *read: Any) -> None:
        function(*read)

    hooked: list[tuple[nn.Module, Callable[[Any], None]]] = []
    if on_attention is not None:
        hooked += [(layer.normaliser, partial(watch, on_attention, i, layer)) for i, layer in layers]
    if on_outputs is not None:
        hooked += [(layer.out, partial(watch, on_outputs, i, layer)) for i, layer in layers]
    if on_hidden is not None:
        hooked += [(part, partial(watch, on_hidden, i)) for i, part in enumerate((*model.blocks, model.norm))]
    return hook_inputs(hooked)


class _Accumulator:
    """Sums over the sequences of a sample, each of `length` tokens."""

    def __init__(self, model: DecoderLM, length: int) -> None:
        self.model, self.length = model, length
        self.n_layers = len(self.model.blocks)
        device = model.device
        head_metrics = (Sparsity, Entropy, Spread)
        heads = [attention.n_heads for attention in model.attentions]
        self.rows = [[Sink(n, length), Mass(n, length), *(metric(n) for metric in head_metrics)] for n in heads]
        self.values = [ValueNorms(n, length) for n in heads]
        self.kinds = [SinkKinds(n) for n in heads]
        self.evicted = EVICTED if model.attentions else 0
        self.hidden = [Collapse() for _ in range(self.n_layers + 1)]
        for metric in chain(*self.rows, self.values, self.kinds, self.hidden):
            metric.to(device)
        options = {"dtype": torch.float64, "device": device}
        self.gap = torch.zeros(self.n_layers + 1, **options)
        self.nll = torch.zeros(2 + self.evicted if self.evicted else 1, length, **options)
        self.predicted = torch.zeros(length, **options)
        self.sequences = self.whole = 0

    def add(self, tokens: Tensor, targets: Tensor, counted: Tensor) -> None:
        """Measure sequences `[B, T]`. counted: bool `[B, T]`, the measured tokens, a prefix of each sequence."""
        self.sequences += len(tokens)
        self.predicted += (targets != IGNORED).sum(0)
        last: list[Tensor] = []
        attended: list[tuple[RowSummary, Tensor]] = []

        def on_attention(layer: int, attention: Attention, call: AttentionCall) -> None:
            summary = summarise(attention.normaliser, call._replace(key_mask=None), counted=counted)
            for metric in self.rows[layer]:
                metric.update(summary)
            self.values[layer].update(call.v, counted)
            attended.append((summary, call.v))

        def on_outputs(layer: int, attention: Attention, outputs: Tensor) -> None:
            self.kinds[layer].update(*attended.pop(), outputs, attention.out.weight)

        def on_hidden(index: int, x: Tensor) -> None:
            self.hidden[index].update(x, counted)
            last.append(x[:, -2:-1].clone())

        with hook_layers(self.model, on_attention, on_hidden, on_outputs):
            self._add_loss(tokens, targets, 0, 0)
        for evicted in range(1, self.evicted + 1):
            self._add_loss(tokens, targets, evicted, evicted)
        if self.evicted:
            with include_evicted_keys(self.model):
                self._add_loss(tokens, targets, self.evicted, N_HELD)
        self._add_repeated_gap(tokens, last, counted.all(1))

    def _add_loss(self, tokens: Tensor, targets: Tensor, evicted: int, row: int) -> None:
        """Add the loss by position, with `evicted` first keys hidden, to a row. Always masked: one backend for all."""
        seen = None
        if self.evicted:
            seen = torch.ones_like(tokens, dtype=torch.bool)
            seen[:, :evicted] = False
        with use_backend(self.model, "auto" if self.model.device.type == "cpu" else "chunked"):  # no other takes masks
            nll = token_nll(self.model(tokens, key_mask=seen), targets)
        self.nll[row] += nll.double().sum(0)

    def _add_repeated_gap(self, tokens: Tensor, last: list[Tensor], whole: Tensor) -> None:
        """Compare the first T - 1 tokens with the same and their last token repeated, so that T positions suffice.

        whole: bool `[B]`, the sequences that are one document.
        """
        self.whole += int(whole.sum())

        def on_hidden(index: int, x: Tensor) -> None:
            self.gap[index] += repeated_gap(last[index], x[:, -2:])[whole].sum()

        with hook_layers(self.model, on_hidden=on_hidden):
            self.model(torch.cat((tokens[:, :-1], tokens[:, -2:-1]), 1))

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays except the maps."""
        per_layer = [*zip(*self.rows, strict=True), self.values, self.kinds, self.hidden]
        found: dict[str, Tensor] = {}
        for metrics in filter(None, per_layer):
            computed = [metric.compute() for metric in metrics]
            found |= {name: torch.stack([values[name] for values in computed]) for name in computed[0]}
        found["hidden/repeated_gap"] = self.gap / self.whole if self.whole else torch.full_like(self.gap, torch.nan)
        by_position = self.nll / self.predicted
        found |= {"loss/by_position": by_position[0], "loss/target_count": self.predicted}
        if self.evicted:
            late = by_position[:, EVICTION_ROW - 1 :]
            predicted = self.predicted[EVICTION_ROW - 1 :]
            rise = torch.stack([pool(loss - late[0], predicted) for loss in late[1:]])
            found["loss/evicted"], found["loss/evicted_n_held"] = rise[:-1], rise[-1]
        found |= collect_learned(self.model)
        if (curves := compute_bias_curves(self.model, self.length)) is not None:
            found["bias/curve"] = curves
            found["bias/alibi_slope"], found["bias/alibi_distance"] = fit_alibi(curves)
        arrays = {name: value.cpu().numpy().astype(np.float32) for name, value in found.items()}
        sample = np.array([self.sequences, self.length, self.n_layers], np.int64)
        return arrays | {"sample": sample, "context": np.array(self.model.context_length, np.int64)}


def _compute_weight_maps(model: DecoderLM, tokens: Tensor, chosen: list[tuple[int, int]]) -> np.ndarray:
    """Weight matrices of one sequence `[1, n]`, float16 `[maps, n, n]`; NaN at hidden keys. chosen: (layer, head)."""
    found: dict[tuple[int, int], Tensor] = {}

    def on_attention(layer: int, attention: Attention, call: AttentionCall) -> None:
        heads = [head for chosen_layer, head in chosen if chosen_layer == layer]
        if heads:
            weights = attention.normaliser.compute_weights(call)
            w = weights.w.masked_fill(~weights.rows.visible, torch.nan)[0]
            found.update({(layer, head): w[head] for head in heads})

    with hook_layers(model, on_attention):
        model(tokens)
    maps = torch.stack([found[layer_and_head] for layer_and_head in chosen]).cpu().numpy()
    # No weight may become 0, which means cut, or infinite.
    size = np.clip(np.abs(maps), np.finfo(np.float16).smallest_subnormal, np.finfo(np.float16).max)
    return np.where(maps == 0, 0, np.copysign(size, maps)).astype(np.float16)
