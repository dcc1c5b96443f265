"""What a model costs beside a twin with softmax attention: time of training and decoding, memory, bytes of a cache."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from lit_lazy.attention import Attention, AttentionCall, AttentionSpec, LayerCache
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.data import Batch, DataConfig
from lit_lazy.measure.diagnostics import evaluation_mode, hook_layers, sample_validation
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.model.saved_memory import measure_saved_bytes
from lit_lazy.support.checks import require, require_whole
from lit_lazy.support.timing import time_in_turns

Attended = tuple[Attention, AttentionCall]
"""A layer, and what it asks of its normaliser."""


@dataclass(frozen=True)
class Costs(Evaluation):
    """Time and memory of a model beside those of its twin (`twin`), in fp32.

    The two take turns in one process, so that whatever else a machine does falls on both alike; a rise is the median
    over the rounds of the ratio of their times, less 1. Times differ from run to run, as nothing else that is measured.
    """

    sequences: int = 4
    """Validation sequences of a step."""
    rounds: int = 10
    """Of turns, each there and back."""
    decoded: int = 16
    """Tokens that are decoded one by one, up to the training's length."""

    def __post_init__(self) -> None:
        require_whole("Costs.sequences", self.sequences, 1)
        require_whole("Costs.rounds", self.rounds, 2)
        require_whole("Costs.decoded", self.decoded, 1)

    def check(self, model: DecoderLM, data: DataConfig) -> None:  # noqa: ARG002
        """Raise ValueError where there is no attention, or no room for the decoded tokens."""
        require(bool(model.attentions), "model.mixer", type(model.cfg.mixer).__name__, "has no attention to compare")
        fix = f"must be below the context's {model.context_length} tokens"
        require(self.decoded < model.context_length, "Costs.decoded", self.decoded, fix)

    def measure(self, model: DecoderLM, data: DataConfig) -> dict[str, float]:
        """Rises over the twin, such as 0.1 for 10 %, and bytes per token.

        `cost/step_rise` of a forward and backward pass, `cost/attention_rise` of those of attention alone on the
        model's own queries and keys, `cost/decode_rise` of decoding, which takes `cost/decode_ms` a token of all
        sequences; `cost/kept_bytes` for the backward pass, and `cost/kept_rise`; `cost/cache_bytes` of all layers.
        """
        (batch,) = sample_validation(data.load(), self.sequences)
        batch = {name: batch[name].to(model.device) for name in ("tokens", "targets")}
        pair = model, make_twin(model)
        asked = record_attention_calls(model, batch["tokens"])
        bare = [AttentionCall(call.q, call.k, call.v) for _, call in asked]
        plain = [*zip(pair[1].attentions, bare, strict=True)]
        caches = [prefill(each, batch["tokens"][:, : -self.decoded]) for each in pair]
        last = batch["tokens"][:, -self.decoded :]
        with evaluation_mode(model), evaluation_mode(pair[1]):
            kept = [measure_kept_per_token(each, batch) for each in pair]
            decoding = self._time_both(*(partial(decode, *each, last) for each in zip(pair, caches, strict=True)))
            times = {
                "step": self._time_both(*(partial(step, each, batch) for each in pair)),
                "attention": self._time_both(partial(attend, asked), partial(attend, plain)),
                "decode": decoding,
            }
        rises = {f"cost/{name}_rise": median_ratio(*seconds) - 1 for name, seconds in times.items()}
        return rises | {
            "cost/decode_ms": 1e3 * statistics.median(decoding[0]) / self.decoded,
            "cost/kept_bytes": kept[0],
            "cost/kept_rise": kept[0] / kept[1] - 1,
            "cost/cache_bytes": cache_bytes_per_token(caches[0], len(last)),
        }

    def _time_both(self, own: Callable[[], None], others: Callable[[], None]) -> tuple[list[float], list[float]]:
        found = time_in_turns({"own": own, "twin": others}, self.rounds)
        return found["own"], found["twin"]


def median_ratio(own: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of own / other."""
    return statistics.median(a / b for a, b in zip(own, others, strict=True))


def make_twin(model: DecoderLM) -> DecoderLM:
    """A model of the same sizes and weights with softmax attention over all keys, and neither bias nor gate."""
    cfg = dataclasses.replace(model.cfg, attention=AttentionSpec())
    other = DecoderLM(cfg, model.embedding.num_embeddings, model.context_length, seed=None)
    other.load_state_dict({name: x for name, x in model.state_dict().items() if name in other.state_dict()})
    return other.to(model.device)


@torch.no_grad()
def record_attention_calls(model: DecoderLM, tokens: Tensor) -> list[Attended]:
    """What each layer asks of its normaliser for tokens `[B, T]`, ready for a backward pass."""
    found: list[Attended] = []
    with evaluation_mode(model), hook_layers(model, lambda _, attention, call: found.append((attention, call))):
        model(tokens)
    return [
        (attention, call._replace(**{name: getattr(call, name).requires_grad_() for name in ("q", "k", "v")}))
        for attention, call in found
    ]


def attend(calls: Sequence[Attended]) -> None:
    """Attention alone, forward and backward, of every layer."""
    for attention, call in calls:
        out, _ = attention.normaliser(call)
        torch.autograd.grad(out.square().sum(), (call.q, call.k, call.v))


def step(model: DecoderLM, batch: Batch) -> None:
    """Forward and backward pass; gradients are not kept."""
    torch.autograd.grad(_compute_loss(model, batch), [p for p in model.parameters() if p.requires_grad])


def measure_kept_per_token(model: DecoderLM, batch: Batch) -> float:
    """Bytes that a forward pass keeps for the backward pass."""
    own = chain(model.parameters(), model.buffers(), batch.values())
    return measure_saved_bytes(lambda: _compute_loss(model, batch), own) / batch["tokens"].numel()


def _compute_loss(model: DecoderLM, batch: Batch) -> Tensor:
    return token_nll(model(batch["tokens"]), batch["targets"]).mean()


@torch.no_grad()
def prefill(model: DecoderLM, tokens: Tensor) -> list[LayerCache]:
    """A cache that holds tokens `[B, T]`."""
    cache = [attention.new_cache() for attention in model.attentions]
    with evaluation_mode(model):
        model(tokens, cache, last_only=True)
    return cache


@torch.no_grad()
def decode(model: DecoderLM, cache: Sequence[LayerCache], tokens: Tensor) -> None:
    """Tokens `[B, T]` one by one; the cache forgets them again."""
    for token in tokens.split(1, 1):
        model(token, cache)
    for layer in cache:
        layer.length -= tokens.shape[1]


def cache_bytes_per_token(cache: Sequence[LayerCache], sequences: int) -> float:
    """Of the keys and values of all layers, as they are kept for one token of one sequence."""
    return sum((layer.k.nbytes + layer.v.nbytes) / (sequences * layer.length) for layer in cache)
