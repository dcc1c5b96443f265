"""What the peers cost at a point, time by CUDA events and the peak of memory; and what the device can do.

These functions run in a worker.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import compiled, device, tuning
from bench.gate import relative_error
from bench.peers import Inputs, Peer, draw, draw_with_share, peers, without_skipping
from bench.points import DECODE, TRAINING, BenchPoint
from bench.worker import announce, format_reason

ROUNDS = 20
COPIED_BYTES, READ_BYTES, PRODUCT_SIZES = 2**32, 2**31, (4096, 8192, 16384)
RECOMPILATIONS = 256


def prepare() -> None:
    """Once in a worker, before anything else."""
    tuning.install()
    torch._dynamo.config.recompile_limit = RECOMPILATIONS  # else FlexAttention's ninth shape would not be compiled


def take_turns(
    steps: Mapping[str, Sequence[Callable[[], Any]]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Milliseconds of every step and round, the order turning; and why a step failed.

    A step is a call per copy of its inputs, of which each round makes the next; all have been made once before the
    first round that counts. Nothing waits for the device in between: its queue stays full, and what launching costs
    stays out of the figures.
    """
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in steps}
    failed: dict[str, str] = {}
    unmeasured = max(map(len, steps.values()), default=0)
    for index in range(unmeasured + rounds):
        for name in sorted(steps, reverse=bool(index % 2)):
            if name not in failed:
                try:
                    start = device.record_event()
                    steps[name][index % len(steps[name])]()
                    marks[name].append((start, device.record_event()))
                except Exception as error:
                    failed[name] = _reason_or_raise(error)
    device.wait()
    times = {
        name: [device.milliseconds(*pair) for pair in marks[name][unmeasured:]] for name in steps if name not in failed
    }
    return times, failed


def _reason_or_raise(error: Exception) -> str:
    """The reason of an error after which the device still works; raises it where it does not."""
    if device.is_broken():
        raise error
    return format_reason(error)


def _step(peer: Peer, operation: str, inputs: Inputs) -> Callable[[], Any]:
    if operation != TRAINING:

        def forward() -> Tensor:
            with torch.no_grad(), peer.around():
                return peer.attend(*inputs)

        return forward
    leaves = [x.detach().requires_grad_() for x in inputs]
    grad = torch.empty_like(inputs.q).normal_(generator=torch.Generator(inputs.q.device).manual_seed(3))

    def both() -> Any:
        with peer.around():
            return torch.autograd.grad(peer.attend(*leaves), leaves, grad, allow_unused=True)

    return both


def measure(
    point: BenchPoint, backend: str, authors: Path | None, left_out: Mapping[str, str], rounds: int = ROUNDS
) -> dict[str, Any]:
    """The point's `share` of empty tiles and how it was made, and a cell per peer.

    A cell: milliseconds (median and quartiles), peak_bytes, difference from the first peer's output where both compute
    the same, and the blocks that were chosen, where any were timed; or not_run, the reason. left_out: peers that are
    not to be tried, and why. Raises what a peer raises where the CUDA context is broken after it.
    """
    inputs, share, recency = draw_with_share(point, device.DEVICE)
    touched = (inputs.q, inputs.k, inputs.v, *([inputs.q] if point.operation == TRAINING else []))
    copies = [inputs] + [
        Inputs(*(x.clone() for x in inputs)) for _ in range(device.count_copies(sum(x.nbytes for x in touched)) - 1)
    ]
    cells: dict[str, dict[str, Any]] = {}
    steps: dict[str, list[Callable[[], Any]]] = {}
    first: Tensor | None = None
    tuning.forget()
    for peer in peers(backend, authors):
        if peer.name in left_out:
            cells[peer.name] = {"not_run": left_out[peer.name]}
            continue
        announce(peer.name)
        tuning.watch()
        try:
            calls = [_step(peer, point.operation, each) for each in copies]
            out = calls[0]()  # compiles and tunes
            cell: dict[str, Any] = {"peak_bytes": device.measure_peak_bytes(calls[0])}
            if point.operation != TRAINING and peer.same:
                first = out.double() if first is None else first
                cell["difference"] = relative_error(out, first)
            if blocks := tuning.list_chosen_blocks():
                cell["blocks"] = blocks
            steps[peer.name] = [device.capture_graph(call) for call in calls] if point.operation == DECODE else calls
            cells[peer.name] = cell
            del out
        except Exception as error:
            cells[peer.name] = {"not_run": _reason_or_raise(error)}
    announce("taking turns")
    times, failed = take_turns(steps, rounds)
    for name, values in times.items():
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        cells[name]["milliseconds"] = {"median": median, "lower": lower, "upper": upper}
    steps.clear()
    device.release()
    cells |= {name: {"not_run": why} for name, why in failed.items()}
    return {"share": share, "recency": recency, "copies": len(copies), "cells": cells}


def compile_choice(point: BenchPoint, backend: str, index: int, skip: bool) -> None:
    """Compiles what our peer (with `skip`, or the one that skips nothing) needs at a point with one configuration.

    Triton keeps it on disk, where the worker that measures finds it.
    """
    ours = peers(backend, None)[0]
    peer = ours if skip else ours._replace(around=without_skipping)
    with tuning.use_choice(index):
        _step(peer, point.operation, draw(point, device.DEVICE))()
    device.wait()


def measure_ceilings(
    copied: int = COPIED_BYTES, read: int = READ_BYTES, sizes: Sequence[int] = PRODUCT_SIZES, rounds: int = ROUNDS
) -> dict[str, float]:
    """What the device can do by torch's own operations: bytes a second copied (read and written) and read, and the
    TFLOP/s of the best bfloat16 matrix product of these sizes.

    Reading is the better of two reductions of bfloat16 keys [.., 128]: the largest of each row, and the sum of all.
    """
    source = torch.randn(copied // 4, device=device.DEVICE)
    target = torch.empty_like(source)
    keys = torch.randn(read // 256, 128, device=device.DEVICE, dtype=torch.bfloat16)
    steps: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "largest": lambda: keys.amax(-1),
        "sum": lambda: keys.view(torch.float32).sum(),
    }
    for size in sizes:
        steps[f"product {size}"] = partial(torch.matmul, *_factors(size))
    times, _ = take_turns({name: [step] for name, step in steps.items()}, rounds)
    seconds = {name: statistics.median(values) / 1000 for name, values in times.items()}
    device.release()
    return {
        "copy_bytes": 2 * source.nbytes / seconds["copy"],
        "read_bytes": keys.nbytes / min(seconds["largest"], seconds["sum"]),
        "product_tflops": max(2 * size**3 / seconds[f"product {size}"] / 1e12 for size in sizes),
    }


def _factors(size: int) -> tuple[Tensor, Tensor]:
    a, b = (torch.randn(size, size, device=device.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return a, b


def share_of_ceiling(
    point: BenchPoint, share: float, cell: Mapping[str, Any], kind: str | None, ceilings: Mapping[str, float]
) -> float | None:
    """How much of what the device can do a peer's time comes to; None where that is not defined.

    Decoding: bytes of keys and values, all of them, over the reading ceiling. Else: the products that the peer's
    function needs at this share of empty tiles (cost model) over the best matrix product's rate.
    """
    if "milliseconds" not in cell:
        return None
    seconds = cell["milliseconds"]["median"] / 1000
    if point.operation == DECODE:
        size = 2 * 2 * point.batch * point.kv_heads * point.length * point.width
        return size / seconds / ceilings["read_bytes"]
    if kind is None:
        return None
    entries = point.batch * point.heads * point.length * (point.length + 1) / 2
    products = compiled.count_products(point.operation, kind, 1 - share)
    return products * 2 * point.width * entries / seconds / 1e12 / ceilings["product_tflops"]
