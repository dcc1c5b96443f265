"""The benchmark's result as Markdown tables and plots."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import compiled
from bench.peers import Peer
from bench.timing import OPERATIONS, SHARES, useful_tflops


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
