"""Attention alone on the CPU, compared with PyTorch's softmax attention (SDPA) on the same queries, keys and values.

Forward and backward pass of the same number of tokens at every shape, and decoding: one query against a cache of keys.
Lazy attention is measured in three states, because what a backend can skip depends on the weights: "softmax" (tau 0, no
bias), "untrained" (tau 1, a learned bias still 0) and "local" (tau 1, a bias of -distance / 8). It runs on the backend
that `auto` selects, and on `chunked` if that is another.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flash_lazy import attention_weights, lazy_attention, resolve_backend
from lit_lazy.support.machine import time_in_turns
from timings.measuring import Quartiles
from timings.step import LOCAL_REACH, TILE_ROWS
from timings.workload import use_one_thread

SDPA, STATES = "sdpa", ("softmax", "untrained", "local")
TILE_COLUMNS = 128
QUERY_STD = 0.3
"""Of queries and keys: weights are nearly uniform, as in an untrained layer."""
DECODE_HEADS, DECODE_HEAD_DIM, DECODE_CALLS = 4, 64, 20
"""Calls: how often a round repeats the query, which takes microseconds."""
SEED = 0


class Shape(NamedTuple):
    """Heads, head dimension and sequence length."""

    heads: int
    head_dim: int
    length: int

    def __str__(self) -> str:
        return f"{self.heads}x{self.head_dim}, L {self.length}"


def list_backends() -> tuple[str, ...]:
    """The backend of `auto` for a float32 tensor on the CPU, first; and `chunked`."""
    return tuple(dict.fromkeys((resolve_backend("auto", torch.empty(1, 1, 1, 1)), "chunked")))


def measure_attention(shape: Shape, tokens: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of a forward and backward pass by path and round, ratios to SDPA, and empty tiles by state.

    tokens: in the batch, a multiple of the shape's length.
    """
    inputs = draw_inputs(shape, tokens)
    seconds = time_in_turns(make_steps(inputs, list_backends()), rounds, time.process_time)
    return compare(seconds) | {"empty_tiles": {state: measure_empty_tiles(inputs, state) for state in STATES}}


def measure_threads(shape: Shape, tokens: int, rounds: int) -> dict[str, Any]:
    """Wall seconds of a forward and backward pass on one thread and on two, and by path their ratio."""
    steps = make_steps(draw_inputs(shape, tokens), list_backends()[:1])
    calls = {f"{name} {n}": partial(run_on_threads, n, step) for name, step in steps.items() for n in (1, 2)}
    with use_one_thread():  # restores the number
        seconds = time_in_turns(calls, rounds)
    ratio = {name: compute_ratio(seconds[f"{name} 1"], seconds[f"{name} 2"]) for name in steps}
    return {"seconds": seconds, "ratio": ratio}


def measure_decoding(batch: int, keys: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of one query of every sequence against its cache, by path and round, and ratios to SDPA."""
    calls = make_calls(draw_decoding_inputs(batch, keys), list_backends(), is_causal=False)
    seconds = time_in_turns({name: partial(repeat, call) for name, call in calls.items()}, rounds, time.process_time)
    return compare({name: [x / DECODE_CALLS for x in times] for name, times in seconds.items()})


def draw_inputs(shape: Shape, tokens: int) -> list[Tensor]:
    """q, k and v `[tokens / L, H, L, D]`, laid out as an attention layer's projections."""
    generator = torch.Generator().manual_seed(SEED)
    size = (tokens // shape.length, shape.length, shape.heads, shape.head_dim)
    q, k, v = (torch.randn(size, generator=generator).transpose(1, 2) for _ in range(3))
    return [x.requires_grad_() for x in (q * QUERY_STD, k * QUERY_STD, v)]


def draw_decoding_inputs(batch: int, keys: int) -> list[Tensor]:
    """q `[B, H, 1, D]`, k and v `[B, H, keys, D]`."""
    generator = torch.Generator().manual_seed(SEED)
    sizes = [(batch, DECODE_HEADS, length, DECODE_HEAD_DIM) for length in (1, keys, keys)]
    q, k, v = (torch.randn(size, generator=generator) for size in sizes)
    return [q * QUERY_STD, k * QUERY_STD, v]


def make_parameters(state: str, heads: int, length: int) -> tuple[Tensor, Tensor | None]:
    """tau `[H]` and bias `[H, L]` of a state, which require gradients."""
    if state == "softmax":
        return torch.zeros(heads, requires_grad=True), None
    reach = {"untrained": torch.inf, "local": LOCAL_REACH}[state]
    bias = (-torch.arange(length) / reach).expand(heads, -1).contiguous()
    return torch.ones(heads, requires_grad=True), bias.requires_grad_()


def make_calls(inputs: Sequence[Tensor], backends: Sequence[str], is_causal: bool) -> dict[str, partial[Tensor]]:
    """The forward pass of every path: SDPA, and `BACKEND STATE`."""
    q, k, v = inputs
    heads, length = k.shape[1:3]
    calls = {
        f"{backend} {state}": partial(
            lazy_attention,
            q,
            k,
            v,
            *make_parameters(state, heads, length),
            backend=backend,  # type: ignore[arg-type]
        )
        for backend in backends
        for state in STATES
    }
    return {SDPA: partial(F.scaled_dot_product_attention, q, k, v, is_causal=is_causal)} | calls


def make_steps(inputs: Sequence[Tensor], backends: Sequence[str]) -> dict[str, Callable[[], None]]:
    """The forward and backward pass of every path, to the gradients of all its inputs and parameters."""
    grad = torch.empty_like(inputs[2]).normal_(generator=torch.Generator().manual_seed(SEED))  # laid out as v
    return {
        name: partial(run_step, call, [x for x in call.args if x is not None], grad)
        for name, call in make_calls(inputs, backends, is_causal=True).items()
    }


def run_step(call: Callable[[], Tensor], leaves: Sequence[Tensor], grad: Tensor) -> None:
    """A forward and backward pass."""
    torch.autograd.grad(call(), leaves, grad)


def run_on_threads(threads: int, step: Callable[[], None]) -> None:
    """A step on this number of threads, which stays set."""
    torch.set_num_threads(threads)
    step()


@torch.no_grad()
def repeat(call: Callable[[], Tensor]) -> None:
    """The forward pass, DECODE_CALLS times."""
    for _ in range(DECODE_CALLS):
        call()


def compare(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The seconds with each path's ratio to SDPA."""
    ratio = {name: compute_ratio(times, seconds[SDPA]) for name, times in seconds.items() if name != SDPA}
    return {"seconds": dict(seconds), "ratio": ratio}


def compute_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios of paired rounds."""
    return asdict(Quartiles.of([a / b for a, b in zip(numerators, denominators, strict=True)]))


@torch.no_grad()
def measure_empty_tiles(inputs: Sequence[Tensor], state: str) -> float:
    """Share of tiles of TILE_ROWS x TILE_COLUMNS without a weight, of those that causality leaves a visible key.

    In the first sequence, over all heads.
    """
    q, k = (x[:1] for x in inputs[:2])
    weights = attention_weights(q, k, *make_parameters(state, *k.shape[1:3])).w
    largest = F.max_pool2d(weights, (TILE_ROWS, TILE_COLUMNS), ceil_mode=True)
    rows, columns = (torch.arange(n) for n in largest.shape[2:])
    is_visible = columns * TILE_COLUMNS < (rows[:, None] + 1) * TILE_ROWS
    return (largest[..., is_visible] == 0).double().mean().item()
