"""Costs of a model relative to a softmax twin: time of training and decoding, activation memory, cache size."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated

import torch
from torch import Tensor

from lit_lazy.attention import Attention, AttentionCall, AttentionSpec, LayerCache
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.data import Batch, DataConfig
from lit_lazy.measure.diagnostics import evaluation_mode, hook_layers, load_at_length, sample_validation
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.support.checked_fields import Bounds, PositiveInt, require
from lit_lazy.support.machine import measure_saved_bytes, time_in_turns

Attended = tuple[Attention, AttentionCall]
"""A layer and its normaliser's call."""


@dataclass(frozen=True)
class Costs(Evaluation):
    """Time and memory of a model relative to its softmax twin (`make_twin`), in fp32.

    The two take turns in one process, so other load on the machine affects both alike. A rise is the median over
    rounds of the ratio of their times, minus 1. Unlike all other metrics, times are not deterministic.
    """

    sequences: PositiveInt = 4
    """Validation sequences per step."""
    rounds: Annotated[int, Bounds(ge=2)] = 10
    """Rounds of turns, each in both orders."""
    decoded: PositiveInt = 16
    """Tokens decoded one by one, at the end of a context."""
    divisors: tuple[PositiveInt, ...] = ()
    """A step is timed too at the context's length divided by each of these, with as many tokens."""

    def check(self, model: DecoderLM, data: DataConfig) -> None:
        """Raises ValueError if the model has no attention or its context has no room for the decoded tokens."""
        require(bool(model.attentions), "model.mixer", type(model.cfg.mixer).__name__, "has no attention to compare")
        fix = f"must be below the context's {model.context_length} tokens"
        require(self.decoded < model.context_length, "Costs.decoded", self.decoded, fix)
        for divisor in self.divisors:
            divides = model.context_length % divisor == 0
            require(divides, "Costs.divisors", divisor, f"must divide the context's {model.context_length} tokens")
            load_at_length(model, data, model.context_length // divisor)

    def measure(self, model: DecoderLM, data: DataConfig) -> dict[str, float]:
        """Rises over the twin (0.1 for 10 %) and bytes per token.

        `cost/step_rise`: a forward and backward pass; `cost/attention_rise`: attention only, on the model's queries and
        keys; `cost/decode_rise` and `cost/decode_ms`: decoding one token of all sequences; `cost/kept_bytes` and
        `cost/kept_rise`: activations saved for the backward pass; `cost/cache_bytes`: cache of all layers. With
        `divisors` also `cost/step_rise_over_16` and so on, and the largest of them, `cost/step_rise_worst`.
        """
        batch = self._sample(model, data, model.context_length)
        both = model, make_twin(model)
        calls = record_attention_calls(model, batch["tokens"])
        bare = [AttentionCall(call.q, call.k, call.v, backend="sdpa") for _, call in calls]
        attended = calls, [*zip(both[1].attentions, bare, strict=True)]
        caches = [prefill(each, batch["tokens"][:, : -self.decoded]) for each in both]
        last = batch["tokens"][:, -self.decoded :]
        with evaluation_mode(both[0]), evaluation_mode(both[1]):
            for each in both:
                for attention in each.attentions:  # which `evaluation_mode` let choose
                    attention.backend = each.cfg.backend
            saved, saved_by_twin = (measure_kept_per_token(each, batch) for each in both)
            decode_rise, seconds = self._time(lambda i: decode(both[i], caches[i], last))
            at_length = {}
            for n in self.divisors:
                shorter = self._sample(model, data, model.context_length // n)
                at_length[f"cost/step_rise_over_{n}"], _ = self._time(lambda i, x=shorter: step(both[i], x))
            rises = {
                "cost/step_rise": self._time(lambda i: step(both[i], batch))[0],
                "cost/attention_rise": self._time(lambda i: attend(attended[i]))[0],
                "cost/decode_rise": decode_rise,
            }
        if at_length:
            rises |= at_length | {"cost/step_rise_worst": max(at_length.values())}
        return rises | {
            "cost/decode_ms": 1e3 * statistics.median(seconds) / self.decoded,
            "cost/kept_bytes": saved,
            "cost/kept_rise": saved / saved_by_twin - 1,
            "cost/cache_bytes": cache_bytes_per_token(caches[0], len(last)),
        }

    def _sample(self, model: DecoderLM, data: DataConfig, length: int) -> Batch:
        """Tokens and targets `[B, length]` of validation text, as many tokens as `sequences` contexts have."""
        source = load_at_length(model, data, length)
        (batch,) = sample_validation(source, self.sequences * model.context_length // length)
        return {name: batch[name].to(model.device) for name in ("tokens", "targets")}

    def _time(self, call: Callable[[int], None]) -> tuple[float, list[float]]:
        """The rise of a call, which is given 0 for the model and 1 for its twin, and the model's seconds."""
        seconds = time_in_turns({"own": partial(call, 0), "twin": partial(call, 1)}, self.rounds)
        return median_ratio(seconds["own"], seconds["twin"]) - 1, seconds["own"]


def median_ratio(own: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, others, strict=True))


def make_twin(model: DecoderLM) -> DecoderLM:
    """A model with the same sizes and weights, but with PyTorch's softmax attention and no other setting of it."""
    cfg = dataclasses.replace(model.cfg, attention=AttentionSpec(), backend="sdpa")
    twin = DecoderLM(cfg, model.embedding.num_embeddings, model.context_length, seed=None)
    twin.load_state_dict({name: x for name, x in model.state_dict().items() if name in twin.state_dict()})
    return twin.to(model.device)


@torch.no_grad()
def record_attention_calls(model: DecoderLM, tokens: Tensor) -> list[Attended]:
    """Each layer's call of its normaliser for tokens `[B, T]`, ready for a backward pass."""
    calls: list[Attended] = []
    with evaluation_mode(model), hook_layers(model, lambda _, attention, call: calls.append((attention, call))):
        model(tokens)
    for x in (x for _, call in calls for x in (call.q, call.k, call.v)):
        x.requires_grad_()
    return calls


def attend(calls: Sequence[Attended]) -> None:
    for attention, call in calls:
        out, _ = attention.normaliser(call)
        torch.autograd.grad(out.square().sum(), (call.q, call.k, call.v))


def step(model: DecoderLM, batch: Batch) -> None:
    """Forward and backward pass; gradients are discarded."""
    torch.autograd.grad(_compute_loss(model, batch), [p for p in model.parameters() if p.requires_grad])


def measure_kept_per_token(model: DecoderLM, batch: Batch) -> float:
    """Bytes per token that a forward pass saves for the backward pass."""
    excluded = chain(model.parameters(), model.buffers(), batch.values())
    return measure_saved_bytes(lambda: _compute_loss(model, batch), excluded) / batch["tokens"].numel()


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
    """Decode tokens `[B, T]` one by one, then reset the cache to its former length."""
    for token in tokens.split(1, 1):
        model(token, cache)
    for layer in cache:
        layer.length -= tokens.shape[1]


def cache_bytes_per_token(cache: Sequence[LayerCache], sequences: int) -> float:
    """Bytes of the keys and values of all layers for one token of one sequence."""
    return sum((layer.k.nbytes + layer.v.nbytes) / (sequences * layer.length) for layer in cache)
