"""Results of the benchmark: a JSON file, replaced atomically after every workload, and its tables and plots."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers import peers
from bench.timing import compute_share_of_ceiling
from bench.workloads import CLAIMED, DECODE, OPERATIONS, Workload

FILE = "bench.json"
DECISIVE = ("source", "machine", "GPU", "driver", "CUDA", "torch", "triton", "python")
"""Figures whose `made` differ in these must not be mixed. `source` is more precise than the commit."""
KINDS = {peer.name: peer.kind for peer in peers("triton", None)}


class RefusedError(Exception):
    """The folder holds results that this command must not continue; one line with the fix."""


def open_results(out: Path, made: Mapping[str, str], fresh: bool) -> dict[str, Any]:
    """Results in a folder to continue; empty results if there are none, or with `fresh`.

    Keys: made, ceilings, gate (rows), points (records by workload). Raises RefusedError if those in the folder
    are from other code or another machine, or cannot be read.
    """
    path = out / FILE
    if fresh or not path.exists():
        return {"made": dict(made), "ceilings": None, "gate": [], "points": {}}
    fix = "give another --out, or --fresh to start again"
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        before = {name: result["made"].get(name, "none") for name in DECISIVE}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RefusedError(f"{path} is not a result of this command ({type(error).__name__}); {fix}") from None
    for name in DECISIVE:
        if before[name] != made.get(name, "none"):
            difference = f"{name} {before[name]}, not {made.get(name, 'none')}"
            raise RefusedError(f"{path} was made with {difference}; {fix}")
    return result


def write(out: Path, result: Mapping[str, Any], plan: Sequence[Workload]) -> None:
    """Write the file and its tables (bench.md), each replaced atomically."""
    for name, text in ((FILE, json.dumps(result, indent=1) + "\n"), ("bench.md", format_tables(result, plan))):
        draft = out / f"{name}.new"
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, out / name)


def list_measured(result: Mapping[str, Any]) -> list[tuple[Workload, dict[str, Any]]]:
    """Workloads with figures, and their records."""
    return [(Workload(**r["point"]), r) for r in result["points"].values() if "cells" in r]


def format_tables(result: Mapping[str, Any], plan: Sequence[Workload]) -> str:
    """Results as Markdown: a table per shape, peers by share of empty tiles; then what is missing, with the reasons."""
    lines = [
        "# Kernels on a GPU",
        "",
        "Milliseconds: median [quartiles], then the share of the device's ceiling. The ceiling is the TFLOP/s of the "
        "best matrix product, compared with the products that the function needs at this share of empty tiles; for "
        "decoding (one query per sequence, as a CUDA graph), the reading rate, compared with all bytes of keys and "
        "values. The peer that skips reads no values of empty tiles, so it may exceed 100 %. bfloat16, tau = 1. Memory "
        "is the rise of the peak, including results. The difference is ||x - y|| / ||y|| at the first share, where y "
        "is the output of the first row; SDPA and AdaSplash compute other functions.",
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
    for workloads, records in _group_by_shape(list_measured(result)):
        lines += _format_table(workloads, records, ceilings)
    missing = list(_list_missing(result, plan))
    lines += ["## Not run", "", *dict.fromkeys(missing), ""] if missing else []
    chosen = list(_list_chosen_blocks(result))
    head = ["## Blocks", "", "| workload | peer | kernel | blocks |", "|:---|:---|:---|:---|"]
    lines += [*head, *chosen, ""] if chosen else []
    return "\n".join(lines)


def _format_gate(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    wrong = [row for row in rows if not row["passed"]]
    cases = len({row["case"] for row in rows})
    lines = [f"Gate: {len(rows) - len(wrong)} of {len(rows)} results of {cases} cases are correct."]
    return [*lines, "", *(f"- wrong: {format_wrong_row(row)}" for row in wrong)] if wrong else lines


def format_wrong_row(row: Mapping[str, Any]) -> str:
    figures = row.get("failed") or f"{row['result']}: error {row['error']:.2e}, bound {row['bound']:.2e}"
    return f"{row['case']}: {figures}"


def _group_by_shape(
    found: Sequence[tuple[Workload, dict[str, Any]]],
) -> Iterator[tuple[list[Workload], list[dict[str, Any]]]]:
    """Workloads that differ only in the share, by operation."""
    shapes = sorted(
        {workload.shape for workload, _ in found}, key=lambda shape: (OPERATIONS.index(shape.operation), shape)
    )
    for shape in shapes:
        of_shape = sorted((each for each in found if each[0].shape == shape), key=lambda each: each[0])
        yield [workload for workload, _ in of_shape], [record for _, record in of_shape]


def _format_table(
    workloads: Sequence[Workload], records: Sequence[Mapping[str, Any]], ceilings: Mapping[str, float] | None
) -> list[str]:
    shares = [f"{record['share']:.0%} empty" + (", RED" if record["red"] else "") for record in records]
    lines = [f"## {workloads[0].title}", "", "| | " + " | ".join(shares) + " | peak memory (MiB) | difference |"]
    lines.append("|:---|" + "---:|" * (len(workloads) + 2))
    for name in records[0]["cells"]:
        cells = [record["cells"][name] for record in records]
        times = [_format_cell(name, *each, ceilings) for each in zip(workloads, records, strict=True)]
        peaks = [cell["peak_bytes"] for cell in cells if "peak_bytes" in cell]
        peak = f"{max(peaks) / 2**20:.0f}" if peaks else "not run"
        difference = f"{cells[0]['difference']:.1e}" if "difference" in cells[0] else "-"
        lines.append(f"| {name} | " + " | ".join(times) + f" | {peak} | {difference} |")
    wrong = dict.fromkeys(name for record in records for name in record["red"])
    return [*lines, "", *([f"RED: timed despite wrong results in {', '.join(wrong)}.", ""] if wrong else [])]


def _format_cell(name: str, workload: Workload, record: Mapping[str, Any], ceilings: Mapping[str, float] | None) -> str:
    cell = record["cells"][name]
    if "not_run" in cell:
        return "not run"
    times = cell["milliseconds"]
    text = f"{times['median']:.3g} [{times['lower']:.3g}, {times['upper']:.3g}]"
    reached = ceilings and compute_share_of_ceiling(workload, record["share"], cell, KINDS[name], ceilings)
    return f"{text} {reached:.0%}" if reached else text


def _list_missing(result: Mapping[str, Any], plan: Sequence[Workload]) -> Iterator[str]:
    """Workloads without figures, then peers without figures, each with its reason."""
    for workload in plan:
        record = result["points"].get(str(workload))
        if record is None:
            yield f"- {workload}: not measured yet; repeat the command"
        elif "lost" in record:
            yield f"- {workload}: lost: {record['lost']}"
        elif "blocked" in record:
            yield f"- {workload}: blocked by the gate: {', '.join(record['blocked'])}"
    for workloads, records in _group_by_shape(list_measured(result)):
        for record in records:
            for name, cell in record["cells"].items():
                if "not_run" in cell:
                    yield f"- {workloads[0].title}: {name}: {cell['not_run']}"


def _list_chosen_blocks(result: Mapping[str, Any]) -> Iterator[str]:
    for workload, record in list_measured(result):
        for name, cell in record["cells"].items():
            for kernel, choice in cell.get("blocks", {}).items():
                yield f"| {workload.title}, {record['share']:.0%} empty | {name} | {kernel} | {choice['blocks']} |"


def write_plots(result: Mapping[str, Any], out: Path) -> str | None:
    """Write roofline.png, sparsity.png and decode.png; returns why plots were skipped, or None."""
    try:
        import matplotlib
    except ImportError:
        return "plots skipped: matplotlib is not installed"
    matplotlib.use("Agg")
    plain = [(p, r) for p, r in list_measured(result) if p.kv_heads == p.heads and p.reach == 512]
    if not plain or result["ceilings"] is None:
        return "plots skipped: none of their workloads was measured"
    ceilings = result["ceilings"]

    def percent(workload: Workload, record: Mapping[str, Any], name: str) -> float | None:
        reached = compute_share_of_ceiling(workload, record["share"], record["cells"][name], KINDS[name], ceilings)
        return None if reached is None else 100 * reached

    def milliseconds(workload: Workload, record: Mapping[str, Any], name: str) -> float | None:  # noqa: ARG001
        return record["cells"][name].get("milliseconds", {}).get("median")

    def draw_if_found(name: str, chosen: Callable[[Workload], bool], x: Callable[..., float], *others: Any) -> None:
        found = [(p, r) for p, r in plain if chosen(p)]
        if found:
            _draw_figure(out / f"{name}.png", found, x, *others)

    product = f"useful products, % of {ceilings['product_tflops']:.0f} TFLOP/s"
    reading = f"keys and values, % of {ceilings['read_bytes'] / 1e12:.2f} TB/s"
    title = "{0.operation}, D {0.width}, {0.share:.0%} empty"
    draw_if_found("roofline", lambda p: p.operation != DECODE and p.share in (0.0, CLAIMED), lambda p, _: p.length,
          "L", percent, product, title)  # fmt: skip
    draw_if_found("sparsity", lambda p: p.operation != DECODE and p.length == 4096, lambda _, r: 100 * r["share"],
          "empty tiles (%), L 4096", milliseconds, "ms", "{0.operation}, D {0.width}")  # fmt: skip
    draw_if_found("decode", lambda p: p.operation == DECODE, lambda p, _: p.batch,
          "sequences, L 32768", percent, reading, title)  # fmt: skip
    return None


def _draw_figure(
    path: Path,
    found: Sequence[tuple[Workload, Mapping[str, Any]]],
    x: Callable[[Workload, Mapping[str, Any]], float],
    x_label: str,
    y: Callable[[Workload, Mapping[str, Any], str], float | None],
    y_label: str,
    panel: str,
) -> None:
    """One panel per title from the format `panel`, one line per peer; crosses mark our wrong results."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    order = sorted(found, key=lambda each: (OPERATIONS.index(each[0].operation), each[0].width, each[0].share))
    titles = list(dict.fromkeys(panel.format(workload) for workload, _ in order))
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
                crossed["timed despite wrong results"] = crosses[0]
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
