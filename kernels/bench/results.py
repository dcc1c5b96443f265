"""The results of the benchmark: a file that is whole after every point, and its tables and plots."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers import peers
from bench.points import CLAIMED, DECODE, OPERATIONS, BenchPoint
from bench.timing import share_of_ceiling

FILE = "bench.json"
DECISIVE = ("source", "machine", "GPU", "driver", "CUDA", "torch", "triton", "python")
"""Where these differ in `made`, figures do not belong together. The commit is not among them: `source` says more."""
KINDS = {peer.name: peer.kind for peer in peers("triton", None)}


class RefusedError(Exception):
    """The folder holds results that this command must not continue; one line, with the fix."""


def open_results(out: Path, made: Mapping[str, str], fresh: bool) -> dict[str, Any]:
    """The results in a folder, to be continued; empty ones where there are none, or fresh ones are wanted.

    Keys: made, ceilings, gate (rows), points (records), by title of the point. Raises Refused where those in the folder
    were made by other code or on another machine, or cannot be read.
    """
    path = out / FILE
    if fresh or not path.exists():
        return {"made": dict(made), "ceilings": None, "gate": [], "points": {}}
    fix = "give another --out, or --fresh to begin again"
    try:
        result = json.loads(path.read_text())
        before = {name: result["made"].get(name, "none") for name in DECISIVE}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"{path} is no result of this command ({type(error).__name__}); {fix}") from None
    for name in DECISIVE:
        if before[name] != made.get(name, "none"):
            was = f"{name} {before[name]}; now it is {made.get(name, 'none')}"
            raise RefusedError(f"{path} was made with {was}: {fix}")
    return result


def write(out: Path, result: Mapping[str, Any], plan: Sequence[BenchPoint]) -> None:
    """The file and its tables (bench.md), each replaced whole."""
    for name, text in ((FILE, json.dumps(result, indent=1) + "\n"), ("bench.md", format_tables(result, plan))):
        draft = out / f"{name}.new"
        draft.write_text(text)
        os.replace(draft, out / name)


def list_measured(result: Mapping[str, Any]) -> list[tuple[BenchPoint, dict[str, Any]]]:
    """The points that have figures, and their records."""
    return [(BenchPoint(**r["point"]), r) for r in result["points"].values() if "cells" in r]


def format_tables(result: Mapping[str, Any], plan: Sequence[BenchPoint]) -> str:
    """The result as Markdown: a table per shape, peers by share of empty tiles; then what is missing, and why."""
    lines = [
        "# Kernels on a GPU",
        "",
        "Milliseconds: median [quartiles]; behind it the share of what the device can do: of the best matrix product's "
        "TFLOP/s by the products that the function needs at this share of empty tiles; decoding (one query for each "
        "sequence, as a CUDA graph), of the reading ceiling by all bytes of keys and values. Values of empty tiles are "
        "not read, so that it may exceed 100 %. bfloat16, tau = 1. Memory is the rise of the peak, results included. "
        "The difference is ||x - y|| / ||y||, y the first row's output, at the first share; SDPA and AdaSplash compute "
        "other functions.",
        "",
        ", ".join(f"{name} {value}" for name, value in result["made"].items()) + ".",
        "",
        *_format_gate(result["gate"]),
        "",
    ]
    ceilings = result["ceilings"]
    if ceilings is not None:
        lines += [
            f"Ceilings: copying {ceilings['copy_bytes'] / 1e12:.2f} TB/s (read and written), "
            f"reading {ceilings['read_bytes'] / 1e12:.2f} TB/s, "
            f"the best bfloat16 product {ceilings['product_tflops']:.0f} TFLOP/s.",
            "",
        ]
    for points, records in _group_by_shape(list_measured(result)):
        lines += _format_table(points, records, ceilings)
    missing = list(_list_missing(result, plan))
    lines += ["## Not run", "", *dict.fromkeys(missing), ""] if missing else []
    chosen = list(_list_chosen_blocks(result))
    head = ["## Blocks", "", "| point | peer | kernel | blocks |", "|:---|:---|:---|:---|"]
    lines += [*head, *chosen, ""] if chosen else []
    return "\n".join(lines)


def _format_gate(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    wrong = [row for row in rows if not row["passed"]]
    cases = len({row["case"] for row in rows})
    lines = [f"Gate: {len(rows) - len(wrong)} of {len(rows)} results of {cases} cases are right."]
    return [*lines, "", *(f"- wrong: {format_wrong_row(row)}" for row in wrong)] if wrong else lines


def format_wrong_row(row: Mapping[str, Any]) -> str:
    figures = row.get("failed") or f"{row['result']}: error {row['error']:.2e}, bound {row['bound']:.2e}"
    return f"{row['case']}: {figures}"


def _group_by_shape(
    found: Sequence[tuple[BenchPoint, dict[str, Any]]],
) -> Iterator[tuple[list[BenchPoint], list[dict[str, Any]]]]:
    """The points that differ in the share alone, by operation."""
    shapes = sorted({point.shape for point, _ in found}, key=lambda shape: (OPERATIONS.index(shape.operation), shape))
    for shape in shapes:
        of_shape = sorted((each for each in found if each[0].shape == shape), key=lambda each: each[0])
        yield [point for point, _ in of_shape], [record for _, record in of_shape]


def _format_table(
    points: Sequence[BenchPoint], records: Sequence[Mapping[str, Any]], ceilings: Mapping[str, float] | None
) -> list[str]:
    shares = [f"{record['share']:.0%} empty" + (", RED" if record["red"] else "") for record in records]
    lines = [f"## {points[0].title}", "", "| | " + " | ".join(shares) + " | peak memory (MiB) | difference |"]
    lines.append("|:---|" + "---:|" * (len(points) + 2))
    for name in records[0]["cells"]:
        cells = [record["cells"][name] for record in records]
        times = [_format_cell(name, *each, ceilings) for each in zip(points, records, strict=True)]
        peaks = [cell["peak_bytes"] for cell in cells if "peak_bytes" in cell]
        peak = f"{max(peaks) / 2**20:.0f}" if peaks else "not run"
        difference = f"{cells[0]['difference']:.1e}" if "difference" in cells[0] else "-"
        lines.append(f"| {name} | " + " | ".join(times) + f" | {peak} | {difference} |")
    wrong = dict.fromkeys(name for record in records for name in record["red"])
    return [*lines, "", *([f"RED: timed although the gate is wrong in {', '.join(wrong)}.", ""] if wrong else [])]


def _format_cell(name: str, point: BenchPoint, record: Mapping[str, Any], ceilings: Mapping[str, float] | None) -> str:
    cell = record["cells"][name]
    if "not_run" in cell:
        return "not run"
    times = cell["milliseconds"]
    text = f"{times['median']:.3g} [{times['lower']:.3g}, {times['upper']:.3g}]"
    reached = ceilings and share_of_ceiling(point, record["share"], cell, KINDS[name], ceilings)
    return f"{text} {reached:.0%}" if reached else text


def _list_missing(result: Mapping[str, Any], plan: Sequence[BenchPoint]) -> Iterator[str]:
    """Points without figures, then peers without, each with its reason."""
    for point in plan:
        record = result["points"].get(str(point))
        if record is None:
            yield f"- {point}: not measured yet; the same command goes on with it"
        elif "lost" in record:
            yield f"- {point}: lost: {record['lost']}"
        elif "blocked" in record:
            yield f"- {point}: blocked by the gate: {', '.join(record['blocked'])}"
    for points, records in _group_by_shape(list_measured(result)):
        for record in records:
            for name, cell in record["cells"].items():
                if "not_run" in cell:
                    yield f"- {points[0].title}: {name}: {cell['not_run']}"


def _list_chosen_blocks(result: Mapping[str, Any]) -> Iterator[str]:
    for point, record in list_measured(result):
        for name, cell in record["cells"].items():
            for kernel, choice in cell.get("blocks", {}).items():
                yield f"| {point.title}, {record['share']:.0%} empty | {name} | {kernel} | {choice['blocks']} |"


def write_plots(result: Mapping[str, Any], out: Path) -> str | None:
    """Writes roofline.png, sparsity.png and decode.png; why not, where they were left out."""
    try:
        import matplotlib
    except ImportError:
        return "the plots were left out: matplotlib is not installed"
    matplotlib.use("Agg")
    plain = [(p, r) for p, r in list_measured(result) if p.kv_heads == p.heads and p.reach == 512]
    if not plain or result["ceilings"] is None:
        return "the plots were left out: nothing that they show was measured"
    ceilings = result["ceilings"]

    def percent(point: BenchPoint, record: Mapping[str, Any], name: str) -> float | None:
        reached = share_of_ceiling(point, record["share"], record["cells"][name], KINDS[name], ceilings)
        return None if reached is None else 100 * reached

    def milliseconds(point: BenchPoint, record: Mapping[str, Any], name: str) -> float | None:  # noqa: ARG001
        return record["cells"][name].get("milliseconds", {}).get("median")

    def draw_if_found(name: str, chosen: Callable[[BenchPoint], bool], x: Callable[..., float], *others: Any) -> None:
        found = [(p, r) for p, r in plain if chosen(p)]
        if found:
            _draw_figure(out / f"{name}.png", found, x, *others)

    product = f"useful products, % of {ceilings['product_tflops']:.0f} TFLOP/s"
    reading = f"keys and values, % of {ceilings['read_bytes'] / 1e12:.2f} TB/s"
    asked = "{0.operation}, D {0.width}, {0.share:.0%} empty"
    draw_if_found("roofline", lambda p: p.operation != DECODE and p.share in (0.0, CLAIMED), lambda p, _: p.length,
          "L", percent, product, asked)  # fmt: skip
    draw_if_found("sparsity", lambda p: p.operation != DECODE and p.length == 4096, lambda _, r: 100 * r["share"],
          "empty tiles (%), L 4096", milliseconds, "ms", "{0.operation}, D {0.width}")  # fmt: skip
    draw_if_found("decode", lambda p: p.operation == DECODE, lambda p, _: p.batch,
          "sequences, L 32768", percent, reading, asked)  # fmt: skip
    return None


def _draw_figure(
    path: Path,
    found: Sequence[tuple[BenchPoint, Mapping[str, Any]]],
    x: Callable[[BenchPoint, Mapping[str, Any]], float],
    x_label: str,
    y: Callable[[BenchPoint, Mapping[str, Any], str], float | None],
    y_label: str,
    panel: str,
) -> None:
    """A panel for each title that `panel` makes of the points, a line per peer; crosses on ours where it is red."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    order = sorted(found, key=lambda each: (OPERATIONS.index(each[0].operation), each[0].width, each[0].share))
    titles = list(dict.fromkeys(panel.format(point) for point, _ in order))
    columns = min(len(titles), 4 if len(titles) > 4 else 2)
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(max(8.0, 4.2 * columns), 3.6 * rows + 1.2), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    lines: dict[str, Any] = {}
    crossed: dict[str, Any] = {}
    for title, axis in zip(titles, axes, strict=False):
        of_panel = sorted(((p, r) for p, r in found if panel.format(p) == title), key=lambda each: x(*each))
        for index, name in enumerate(KINDS):
            line = [(x(p, r), value, bool(r["red"])) for p, r in of_panel if (value := y(p, r, name)) is not None]
            if not line:
                continue
            color, marker = f"C{index}", "osv^D<>xPd"[index % 10]
            lines[name] = axis.plot([a for a, *_ in line], [b for _, b, _ in line], color=color, marker=marker)[0]
            wrong = [(a, b) for a, b, red in line if red and name.startswith("flash_lazy")]
            if wrong:
                crosses = axis.plot(*zip(*wrong, strict=True), "x", color="red", markersize=11, zorder=3)
                crossed["timed though the gate is red"] = crosses[0]
        axis.set(title=title, xlabel=x_label, ylabel=y_label)
        if y_label == "ms":
            axis.set_yscale("log")
            continue
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator(sorted({x(p, r) for p, r in of_panel})))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_ylim(bottom=0)
    for axis in axes[len(titles) :]:
        axis.remove()
    lines |= crossed
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)
