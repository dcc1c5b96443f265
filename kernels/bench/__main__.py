"""Speed and memory of flash_lazy beside its peers on a GPU; on a CPU, what the kernels cost on paper and compile to.

On a CUDA device the kernels' results are checked first, and nothing is timed where a check fails (exit status 1). Then
forward, forward + backward and decoding are timed: all peers in one process, taking turns, by CUDA events; median and
quartiles over the rounds. The data is random, with a recency that sets the share of 64 x 64 tiles in which no weight
survives; that share is measured. A peer that could not be had reads "not run", with the reason.

Without a CUDA device (also with CUDA_VISIBLE_DEVICES= ) the cost model and a table of what the kernels compile to are
told; neither is a measurement of speed. Needs torch and triton; the plots need matplotlib.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

import torch
import triton
from torch import Tensor

from bench import compiled
from bench.peers import GATE, Inputs, Peer, draw_with_share, gate, peers, reason, relative_error
from flash_lazy.fused import launch

LENGTHS, QUICK_LENGTHS, WIDTHS = (1024, 2048, 4096, 8192, 16384, 32768), (4096,), (64, 128)
TOKENS, HEADS, SHARES = 16384, 16, (0.0, 0.3, 0.6, 0.9)
ROUNDS, QUICK_MINUTES, MOST_WORKERS = 20, 8.0, 8
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


def tables(result: Mapping[str, Any]) -> str:
    """The result as Markdown: a table per operation, width and length, peers by share of empty tiles."""
    made = result["made"]
    lines = [
        "# Kernels on a GPU",
        "",
        f"Milliseconds, median of {result['rounds']} rounds [quartiles], bfloat16, {result['tokens']} tokens, "
        f"{result['heads']} heads, 512 biases a head, tau = 1; memory is the rise of the peak, results included. "
        "Decoding is one query for each sequence, as a CUDA graph. The difference is ||x - y|| / ||y||, y the first "
        "row's output, at the first share; SDPA and AdaSplash compute other functions.",
        "",
        ", ".join(f"{name} {value}" for name, value in made.items()) + ".",
    ]
    reasons = []
    for operation, points in _grouped(result["points"]):
        length, width = points[0]["length"], points[0]["width"]
        title = f"{operation}, B {points[0]['batch']}, L {length}, D {width}"
        shares = [f"{p['share']:.0%} empty" if "share" in p else f"({p['asked']:.0%} empty)" for p in points]
        lines += ["", f"## {title}", "", "| | " + " | ".join(shares) + " | peak memory (MiB) | difference |"]
        lines.append("|:---|" + "---:|" * (len(points) + 2))
        for name in points[0][operation]:
            cells = [point[operation][name] for point in points]
            peaks = [cell["peak_bytes"] for cell in cells if cell.get("peak_bytes") is not None]
            peak = f"{max(peaks) / 2**20:.0f}" if peaks else "not run"
            difference = f"{cells[0]['difference']:.1e}" if "difference" in cells[0] else "-"
            lines.append(f"| {name} | " + " | ".join(map(_cell, cells)) + f" | {peak} | {difference} |")
            reasons += [f"- {title}: {name}: {cell['not_run']}" for cell in cells if "not_run" in cell]
    if reasons:
        lines += ["", "## Not run", "", *dict.fromkeys(reasons)]
    return "\n".join(lines) + "\n"


def _grouped(points: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Operations with the points that differ in the share alone."""
    for operation in OPERATIONS:
        for shape in dict.fromkeys((point["width"], point["length"]) for point in points):
            yield operation, [point for point in points if (point["width"], point["length"]) == shape]


def _cell(cell: Mapping[str, Any]) -> str:
    if "not_run" in cell:
        return "not run"
    times = cell["milliseconds"]
    return f"{times['median']:.3g} [{times['lower']:.3g}, {times['upper']:.3g}]"


def plots(result: Mapping[str, Any], candidates: Sequence[Peer], out: Path) -> str | None:
    """Writes roofline and sparsity plots (SVG and PNG) into `out`; why not, where they were left out."""
    try:
        import matplotlib
    except ImportError:
        return "the plots were left out: matplotlib is not installed"
    matplotlib.use("Agg")
    points = [point for point in result["points"] if "share" in point]
    if not points:
        return "the plots were left out: no point was measured"
    longest = max(point["length"] for point in points)
    length = 4096 if any(point["length"] == 4096 for point in points) else longest

    def share_of_ceiling(point: Mapping[str, Any], operation: str, peer: Peer) -> float | None:
        reached = useful_tflops(point, operation, peer)
        return None if reached is None else 100 * reached / result["ceiling_tflops"]

    def milliseconds(point: Mapping[str, Any], operation: str, peer: Peer) -> float | None:
        return point[operation][peer.name].get("milliseconds", {}).get("median")

    densest = [point for point in points if point["asked"] == min(SHARES)]
    at_length = [point for point in points if point["length"] == length]
    reading = f"useful products, % of {result['ceiling_tflops']:.0f} TFLOP/s"
    _draw(out / "roofline", densest, candidates, "length", "L", share_of_ceiling, reading)
    _draw(out / "sparsity", at_length, candidates, "share", f"share of empty tiles, L {length}", milliseconds, "ms")
    return None


def _draw(
    path: Path,
    points: Sequence[Mapping[str, Any]],
    candidates: Sequence[Peer],
    across: str,
    across_label: str,
    value: Callable[[Mapping[str, Any], str, Peer], float | None],
    label: str,
) -> None:
    """A panel per operation and width, a line per peer; times and lengths on logarithmic axes."""
    from matplotlib.figure import Figure

    operations = tuple(compiled.PRODUCTS)
    widths = sorted({point["width"] for point in points})
    figure = Figure(figsize=(5 * len(widths), 8), layout="constrained")
    axes = figure.subplots(len(operations), len(widths), squeeze=False)
    for operation, row in zip(operations, axes, strict=True):
        for width, axis in zip(widths, row, strict=True):
            for index, peer in enumerate(candidates):
                line = [(p[across], value(p, operation, peer)) for p in points if p["width"] == width]
                line = [(x, y) for x, y in line if y is not None]
                if line:
                    axis.plot(*zip(*line, strict=True), marker="osv^D<>xPd"[index % 10], label=peer.name)
            axis.set(title=f"{operation}, D {width}", xlabel=across_label, ylabel=label)
            if across == "length":
                axis.set_xscale("log", base=2)
                axis.set_ylim(bottom=0)
            else:
                axis.set_yscale("log")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    for suffix in ("svg", "png"):
        figure.savefig(path.with_suffix(f".{suffix}"), dpi=150)


def made_with() -> dict[str, str]:
    """How, when and on what the figures were made."""

    def told(*command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"

    made = {
        "command": "python -m bench " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": told("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        made |= {
            "GPU": torch.cuda.get_device_name(),
            "driver": told("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "CUDA": str(torch.version.cuda),
        }
    return made


def _publish(out: Path | None, name: str, result: Mapping[str, Any], text: str) -> None:
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / f"{name}.md").write_text(text)


def check(backend: str, device: torch.device, names: Sequence[str] = tuple(GATE)) -> list[dict[str, Any]]:
    """The gate, its cases in processes of their own: each compiles kernels of its own, which takes the time."""
    workers = min(os.cpu_count() or 1, MOST_WORKERS, len(names))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        return [row for rows in pool.map(partial(gate, backend, device), [[name] for name in names]) for row in rows]


def on_paper(options: argparse.Namespace) -> int:
    """Cost model and compile-only table; the exit status."""
    if launch.INTERPRETED:
        print("TRITON_INTERPRET=1: nothing is compiled where triton interprets; unset it", file=sys.stderr)
        return 2
    made = made_with()
    rows = compiled.report(options.widths, options.all_configurations)
    text = "\n".join([
        "# Kernels without a GPU",
        "",
        "Nothing here is a measurement of speed: counts of the kernels as written, and what they compile to.",
        "",
        ", ".join(f"{name} {value}" for name, value in made.items()) + ".",
        "",
        compiled.cost_model(),
        "## Compiled",
        "",
        compiled.table(rows),
    ])  # fmt: skip
    _publish(options.out, "compiled", {"made": made, "rows": rows}, text)
    return 0


def on_gpu(options: argparse.Namespace) -> int:
    """Correctness gate, then all measurements; the exit status."""
    started, device = time.monotonic(), torch.device("cuda")

    def over() -> bool:
        return options.minutes is not None and time.monotonic() - started > 60 * options.minutes

    checked = check("triton", device)
    wrong = [row for row in checked if not row["passed"]]
    for row in wrong:
        figures = row.get("failed") or f"{row['result']}: error {row['error']:.2e}, bound {row['bound']:.2e}"
        print(f"wrong: {row['case']}: {figures}", file=sys.stderr)
    if wrong:
        print(f"{len(wrong)} of {len(checked)} results are wrong; nothing was timed", file=sys.stderr)
        return 1
    print(f"all {len(checked)} results are within twice the error of plain PyTorch in the same precision")
    candidates = peers("triton", options.authors)
    result = {
        "made": made_with(),
        "tokens": TOKENS,
        "heads": HEADS,
        "rounds": ROUNDS,
        "ceiling_tflops": measure_ceiling(device),
        "gate": checked,
        "points": measure_all(candidates, options.lengths, options.widths, device, over),
    }
    _publish(options.out, "bench", result, tables(result))
    if options.out is not None and (left_out := plots(result, candidates, options.out)):
        print(left_out)
    return 0


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _numbers(name: str, wanted: str, fits: Callable[[int], bool]) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        parts = text.split(",")
        if not all(part.isdecimal() and fits(int(part)) for part in parts):
            raise argparse.ArgumentTypeError(f"{name} has {text!r}; give {wanted}")
        return tuple(int(part) for part in parts)

    return parse


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give minutes above 0")
    return minutes


def _checkout(text: str) -> Path:
    if not (Path(text) / "lazy_attention_triton.py").is_file():
        raise argparse.ArgumentTypeError(
            f"no lazy_attention_triton.py in {text!r}; give a checkout of their repository"
        )
    return Path(text)


def _folder(text: str) -> Path:
    existing = next(path for path in (Path(text), *Path(text).absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{str(existing)!r} is no folder that can be written; give a folder, which may be new"
        )
    return Path(text)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    lengths = _numbers("it", "multiples of 64 from 128 on, with commas between", lambda x: x >= 128 and x % 64 == 0)
    widths = _numbers("it", "whole numbers from 16 to 256, with commas between", lambda x: 16 <= x <= 256)
    text = "folder for tables, figures (JSON) and plots; without it they are only told"
    parser.add_argument("--out", type=_folder, metavar="FOLDER", help=text)
    text = f"sequence lengths L, {TOKENS} tokens to a batch (default: {','.join(map(str, LENGTHS))})"
    parser.add_argument("--lengths", type=lengths, help=text)
    parser.add_argument("--widths", type=widths, default=WIDTHS, help="widths D of a head (default: 64,128)")
    text = "checkout of github.com/Fzkuji/flash-lazy-attention, to be measured too"
    parser.add_argument("--authors", type=_checkout, metavar="PATH", help=text)
    text = f"one length, {QUICK_LENGTHS[0]}, within {QUICK_MINUTES:.0f} minutes (either can be set)"
    parser.add_argument("--quick", action="store_true", help=text)
    text = "starts no new measurement after M minutes; the rest reads 'not run'"
    parser.add_argument("--minutes", type=_minutes, metavar="M", help=text)
    text = "without a GPU: compiles every configuration, not only the default ones"
    parser.add_argument("--all-configurations", action="store_true", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status: 0 done, 1 wrong results, 2 wrong input."""
    options = make_parser().parse_args(argv)
    idle = [f"--{name}" for name in ("lengths", "quick", "minutes", "authors") if getattr(options, name)]
    if idle and not torch.cuda.is_available():
        print(f"{', '.join(idle)} left aside: nothing is timed without a GPU", file=sys.stderr)
    options.lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    if options.quick and options.minutes is None:
        options.minutes = QUICK_MINUTES
    return on_gpu(options) if torch.cuda.is_available() else on_paper(options)


if __name__ == "__main__":
    sys.exit(main())
