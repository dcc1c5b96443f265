"""Time (by CUDA events) and peak memory of the peers at a workload, and the ceilings of the device.

These functions run in a worker process.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import compile_report, cuda, tuning
from bench.correctness import relative_error
from bench.peers import Inputs, Peer, draw, draw_with_share, peers, skip_empty_tiles
from bench.worker import announce, format_reason
from bench.workloads import DECODE, TRAINING, Workload

ROUNDS = 20
COPIED_BYTES, READ_BYTES, PRODUCT_SIZES = 2**32, 2**31, (4096, 8192, 16384)
RECOMPILATIONS = 256


def prepare() -> None:
    """Prepare a worker process; called first."""
    tuning.install()
    torch._dynamo.config.recompile_limit = RECOMPILATIONS  # the default would not compile FlexAttention's ninth shape


def take_turns(
    steps: Mapping[str, Sequence[Callable[[], Any]]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Milliseconds of every step and round, in alternating order; and the reasons of failed steps.

    A step has one call per copy of its inputs; each round makes the next call, and every call runs once before the
    first measured round. The host never waits for the device in between: its queue stays full, so that the figures
    exclude launch costs.
    """
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in steps}
    failed: dict[str, str] = {}
    warmup = max(map(len, steps.values()), default=0)
    for index in range(warmup + rounds):
        for name in sorted(steps, reverse=bool(index % 2)):
            if name not in failed:
                try:
                    start = cuda.record_event()
                    steps[name][index % len(steps[name])]()
                    events[name].append((start, cuda.record_event()))
                except Exception as error:
                    failed[name] = _reason_or_raise(error)
    torch.cuda.synchronize()
    times = {
        name: [start.elapsed_time(end) for start, end in events[name][warmup:]] for name in steps if name not in failed
    }
    return times, failed


def _reason_or_raise(error: Exception) -> str:
    """The error in one line; raises it if the device no longer works."""
    if cuda.is_broken():
        raise error
    return format_reason(error)


def _make_step(peer: Peer, operation: str, inputs: Inputs) -> Callable[[], Any]:
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
    workload: Workload, backend: str, authors: Path | None, left_out: Mapping[str, str], rounds: int = ROUNDS
) -> dict[str, Any]:
    """Record of a workload: its `share` of empty tiles, the recency and copies of the inputs, and a cell per peer.

    A cell holds milliseconds (median and quartiles), peak_bytes, the difference from the first peer's output if both
    compute the same function, and the chosen blocks if any were tuned; or not_run, the reason. left_out: peers to skip,
    with the reasons. Raises a peer's error if it breaks the CUDA context.
    """
    inputs, share, recency = draw_with_share(workload, cuda.DEVICE)
    read = (inputs.q, inputs.k, inputs.v, *([inputs.q] if workload.operation == TRAINING else []))
    copies = [inputs] + [
        Inputs(*(x.clone() for x in inputs)) for _ in range(cuda.count_copies(sum(x.nbytes for x in read)) - 1)
    ]
    cells: dict[str, dict[str, Any]] = {}
    steps: dict[str, list[Callable[[], Any]]] = {}
    expected: Tensor | None = None
    tuning.forget()
    for peer in peers(backend, authors):
        if peer.name in left_out:
            cells[peer.name] = {"not_run": left_out[peer.name]}
            continue
        announce(peer.name)
        tuning.watch()
        try:
            calls = [_make_step(peer, workload.operation, each) for each in copies]
            out = calls[0]()  # compiles and tunes
            cell: dict[str, Any] = {"peak_bytes": cuda.measure_peak_bytes(calls[0])}
            if workload.operation != TRAINING and peer.same:
                expected = out.double() if expected is None else expected
                cell["difference"] = relative_error(out, expected)
            if blocks := tuning.list_chosen_blocks():
                cell["blocks"] = blocks
            steps[peer.name] = [cuda.capture_graph(call) for call in calls] if workload.operation == DECODE else calls
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
    torch.cuda.empty_cache()
    cells |= {name: {"not_run": why} for name, why in failed.items()}
    return {"share": share, "recency": recency, "copies": len(copies), "cells": cells}


def compile_choice(workload: Workload, backend: str, index: int, skip: bool) -> None:
    """Compile our kernels for a workload with one configuration, with or without skipping of empty tiles.

    Triton caches the result on disk for the worker that measures.
    """
    peer = peers(backend, None)[0]._replace(around=partial(skip_empty_tiles, skip))
    with tuning.use_choice(index):
        _make_step(peer, workload.operation, draw(workload, cuda.DEVICE))()
    torch.cuda.synchronize()


def measure_ceilings(
    copied: int = COPIED_BYTES, read: int = READ_BYTES, sizes: Sequence[int] = PRODUCT_SIZES, rounds: int = ROUNDS
) -> dict[str, float]:
    """Ceilings of the device with torch operations: bytes per second copied (read and written) and read, and TFLOP/s
    of the best bfloat16 matrix product of these sizes.

    Reading is the faster of two reductions of bfloat16 keys [.., 128]: the maximum of each row, and the total sum.
    """
    source = torch.randn(copied // 4, device=cuda.DEVICE)
    target = torch.empty_like(source)
    keys = torch.randn(read // 256, 128, device=cuda.DEVICE, dtype=torch.bfloat16)
    steps: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "largest": lambda: keys.amax(-1),
        "sum": lambda: keys.view(torch.float32).sum(),
    }
    for size in sizes:
        steps[f"product {size}"] = partial(torch.matmul, *_draw_matrices(size))
    times, _ = take_turns({name: [step] for name, step in steps.items()}, rounds)
    seconds = {name: statistics.median(values) / 1000 for name, values in times.items()}
    torch.cuda.empty_cache()
    return {
        "copy_bytes": 2 * source.nbytes / seconds["copy"],
        "read_bytes": keys.nbytes / min(seconds["largest"], seconds["sum"]),
        "product_tflops": max(2 * size**3 / seconds[f"product {size}"] / 1e12 for size in sizes),
    }


def _draw_matrices(size: int) -> tuple[Tensor, Tensor]:
    a, b = (torch.randn(size, size, device=cuda.DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return a, b


def compute_share_of_ceiling(
    workload: Workload, share: float, cell: Mapping[str, Any], kind: str | None, ceilings: Mapping[str, float]
) -> float | None:
    """A peer's rate as a share of the device's ceiling; None if undefined.

    Decoding: all bytes of keys and values, relative to the reading ceiling. Otherwise: the products that the peer's
    function needs at this share of empty tiles (cost model), relative to the best matrix product.
    """
    if "milliseconds" not in cell:
        return None
    seconds = cell["milliseconds"]["median"] / 1000
    if workload.operation == DECODE:
        size = 2 * 2 * workload.batch * workload.kv_heads * workload.length * workload.width
        return size / seconds / ceilings["read_bytes"]
    if kind is None:
        return None
    entries = workload.batch * workload.heads * workload.length * (workload.length + 1) / 2
    products = compile_report.count_products(workload.operation, kind, 1 - share)
    return products * 2 * workload.width * entries / seconds / 1e12 / ceilings["product_tflops"]
