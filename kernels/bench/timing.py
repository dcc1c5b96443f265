"""What the peers cost: time by CUDA events, taking turns, and the peak of memory."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bench import compiled
from bench.peers import Inputs, Peer, draw_with_share, reason, relative_error

TOKENS, HEADS, SHARES, ROUNDS = 16384, 16, (0.0, 0.3, 0.6, 0.9), 20
OPERATIONS = ("forward", "forward+backward", "decode")
USED_UP = "the time was used up (--minutes)"


def _mark(device: torch.device) -> Any:
    """A moment on the device; on a CPU, seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: Any, end: Any) -> float:
    return 1000 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def take_turns(
    steps: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Milliseconds of every step and round, the order turning, after one round to warm up; and why a step failed.

    Nothing waits for the device in between: its queue stays full, and what launching costs stays out of the figures.
    """
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in steps}
    failed: dict[str, str] = {}
    for index in range(rounds + 1):
        for name in sorted(steps, reverse=bool(index % 2)):
            if name not in failed:
                try:
                    start = _mark(device)
                    steps[name]()
                    marks[name].append((start, _mark(device)))
                except Exception as error:
                    failed[name] = reason(error)
    _wait(device)
    times = {name: [_milliseconds(*pair) for pair in marks[name][1:]] for name in steps if name not in failed}
    return times, failed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _step(peer: Peer, operation: str, inputs: Inputs) -> Callable[[], Any]:
    q, k, v, tau, bias = inputs
    if operation != "forward+backward":
        query = q[:, :, -1:] if operation == "decode" else q

        def forward() -> Tensor:
            with torch.no_grad(), peer.around():
                return peer.attend(query, k, v, tau, bias)

        return forward
    leaves = [x.detach().requires_grad_() for x in inputs]
    grad = torch.empty_like(q).normal_(generator=torch.Generator(q.device).manual_seed(3))

    def both() -> Any:
        with peer.around():
            return torch.autograd.grad(peer.attend(*leaves), leaves, grad, allow_unused=True)

    return both


def _peak(step: Callable[[], Any], device: torch.device) -> int | None:
    """Bytes by which a call raises the peak of what is allocated, its results included."""
    if device.type != "cuda":
        return None
    _wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    _wait(device)
    return torch.cuda.max_memory_allocated(device) - before


def _as_graph(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as a CUDA graph: a decoding step is shorter than its launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def measure(
    candidates: Sequence[Peer], operation: str, inputs: Inputs, rounds: int, over: Callable[[], bool]
) -> dict[str, dict[str, Any]]:
    """One cell per peer: milliseconds (median and quartiles), peak_bytes, difference from the first; or not_run."""
    device = inputs.q.device
    cells: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], Any]] = {}
    first = None
    for peer in candidates:
        if over():
            cells[peer.name] = {"not_run": USED_UP}
            continue
        try:
            step = _step(peer, operation, inputs)
            out = step()  # compiles and tunes
            cell: dict[str, Any] = {"peak_bytes": _peak(step, device)}
            cells[peer.name] = cell
            if operation != "forward+backward" and peer.same:
                first = out.double() if first is None else first
                cell["difference"] = relative_error(out, first)
            if operation == "decode" and device.type == "cuda":
                step = _as_graph(step)
            steps[peer.name] = step
            del out
        except Exception as error:
            cells[peer.name] = {"not_run": reason(error)}
    first = None
    times, failed = take_turns(steps, rounds, device)
    for name, values in times.items():
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        cells[name]["milliseconds"] = {"median": median, "lower": lower, "upper": upper}
    return cells | {name: {"not_run": why} for name, why in failed.items()}


def measure_all(
    candidates: Sequence[Peer],
    lengths: Sequence[int],
    widths: Sequence[int],
    device: torch.device,
    over: Callable[[], bool],
    tokens: int = TOKENS,
    heads: int = HEADS,
    rounds: int = ROUNDS,
    console: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """One point per length, width and share; those that the time did not allow hold no share and no figures."""
    points = []
    for length in lengths:
        for width in widths:
            torch.compiler.reset()  # else its limit of compilations of one function ends FlexAttention's
            for asked in SHARES:
                batch = max(1, tokens // length)
                point: dict[str, Any] = {"length": length, "batch": batch, "width": width, "asked": asked}
                points.append(point)
                if over():
                    cell = {"not_run": USED_UP}
                    point |= {operation: {peer.name: cell for peer in candidates} for operation in OPERATIONS}
                    continue
                inputs, point["share"], point["recency"] = draw_with_share(asked, batch, heads, length, width, device)
                console(f"L {length}, D {width}, {point['share']:.1%} of the tiles empty")
                for operation in OPERATIONS:
                    point[operation] = measure(candidates, operation, inputs, rounds, over)
    return points


def measure_ceiling(device: torch.device, size: int = 8192, rounds: int = ROUNDS) -> float:
    """TFLOP/s of torch's own bfloat16 matrix product."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times, _ = take_turns({"product": lambda: a @ b}, rounds, device)
    return 2 * size**3 / statistics.median(times["product"]) / 1e9


def useful_tflops(point: Mapping[str, Any], operation: str, peer: Peer) -> float | None:
    """TFLOP/s of the products that the peer's function needs at the point's share of empty tiles (cost model)."""
    times = point[operation][peer.name].get("milliseconds")
    if times is None or peer.kind is None or operation not in compiled.PRODUCTS:
        return None
    entries = point["batch"] * HEADS * point["length"] * (point["length"] + 1) / 2
    products = compiled.products(operation, peer.kind, 1 - point["share"])
    return products * 2 * point["width"] * entries / times["median"] / 1e9
