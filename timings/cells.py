"""Where a cell stands on this machine's CPU: cells per core-hour against another commit, and attention against SDPA.

Cells: whole trainings of shipped experiments as a grid runs them, each on one thread in a process of its own
(`timings.one_cell`), in pairs of this checkout and a checkout of another commit that take turns. The figure is the CPU
time of `run`, without imports. A step's share of the machine's product rate is its FLOPs per CPU second of forward,
backward and optimiser, over those of a large float32 product in the same process.

A pair has its own seed, and records the final metrics too: over ten seeds the table gives the interval of the
difference that the new commit makes to the result, where it should make none beyond rounding.

Attention, threads and decoding: `timings.attention`.

The file is written after every measurement. The same command on the same code and machine measures what is missing.
"""

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from scipy.stats import t as student

from timings import one_cell
from timings.attention import (
    DECODE_HEAD_DIM,
    DECODE_HEADS,
    SDPA,
    STATES,
    TILE_COLUMNS,
    Shape,
    compute_ratio,
    list_backends,
    measure_attention,
    measure_decoding,
    measure_threads,
)
from timings.measuring import Quartiles
from timings.one_cell import PHASES, ROWS
from timings.results import collect_provenance, format_provenance, format_row, format_spread, publish, save
from timings.step import TILE_ROWS
from timings.workload import use_one_thread

ROOT = Path(__file__).parents[1]
CODE = ("lit_lazy", "kernels/flash_lazy", "experiments", "timings")
"""Folders whose files decide a figure."""
LIBRARIES = "kernels/flash_lazy/cpu/*.so"
SECTIONS = ("attention", "decoding", "threads", "cells")
"""What is measured, the shortest first."""
EXPERIMENTS, AGAINST = ("backcopy", "stdlib_small", "stdlib_long"), "3b7b986"
AGREEMENT = {"backcopy": ("loss/excess", 1e-4), "stdlib_small": ("loss/val", 0.01)}
"""Outcome of an experiment in nats, and the difference up to which two commits agree on it. Rounding decorrelates
trainings: over the pilot seeds 100 to 102 the difference of lazy had standard deviations of 2.1e-5 and 4.6e-3, so that
the 95 % interval of ten seeds is within +-1.5e-5 and +-3.3e-3 of the mean difference."""
CONFIDENCE = 0.95
HEADS, LENGTHS = ((1, 64), (4, 64), (4, 16)), (128, 512, 2048)


class CellSizes(NamedTuple):
    """How much is measured."""

    pairs: Mapping[str, int] = MappingProxyType({"backcopy": 10, "stdlib_small": 10, "stdlib_long": 3})
    """Pairs of cells of each experiment, each 2 or more: seeds 0, 1, ..."""
    steps: int | None = None
    """Of each cell; None for the experiment's own."""
    attention_rounds: int = 10
    """Of everything else, 2 or more."""
    tokens: int = 2048
    """Per batch of attention, a multiple of every length."""
    shapes: Sequence[Shape] = tuple(Shape(*heads, length) for heads, length in product(HEADS, LENGTHS))
    threaded: Sequence[Shape] = (Shape(4, 64, 512), Shape(4, 64, 2048), Shape(1, 64, 2048))
    """Shapes measured on one thread and on two."""
    caches: Sequence[tuple[int, int]] = tuple(product((1, 8), (512, 2048, 8192)))
    """Sequences and keys of each."""


FULL = CellSizes()
QUICK = CellSizes({"backcopy_tiny": 2}, 4, 2, 128, (Shape(2, 16, 64),), (Shape(2, 16, 64),), ((1, 32),))
"""CellSizes of a smoke test; its figures mean nothing."""


def bench_cells(
    sections: Sequence[str] = SECTIONS,
    experiments: Sequence[str] = EXPERIMENTS,
    against: str = AGAINST,
    sizes: CellSizes = FULL,
    out: Path | None = None,
    console: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure what `out` (.json) lacks, write it and the tables (.md) after each measurement, and print the tables.

    sections: of SECTIONS. against: the other commit. Raises ValueError if an argument does not fit, and RuntimeError if
    a cell fails.
    """
    if unknown := [section for section in sections if section not in SECTIONS]:
        raise ValueError(f"--sections has {unknown[0]!r}: choose from {', '.join(SECTIONS)}")
    counts = {"pairs": min(sizes.pairs.values()), "attention_rounds": sizes.attention_rounds}
    for name, value in counts.items():
        if value < 2:
            raise ValueError(f"{name} is {value}: must be 2 or more, or there is no spread")
    commit = find_commit(against, experiments)
    with use_one_thread():
        result = collect_provenance(out)
        result["identity"] = make_identity(result["environment"], commit, sizes)
        result |= read_known(out, result["identity"], console)
        calls = plan_attention(sizes)
        complete(result, {name: calls[name] for name in SECTIONS if name in sections and name in calls}, out, console)
        if "cells" in sections:
            with check_out(commit) as tree:
                complete(result, {"cells": plan_cells(tree, experiments, sizes)}, out, console)
    publish(result, format_table(result), out, console)
    return result


def find_commit(name: str, experiments: Sequence[str]) -> str:
    """The short hash of a commit. Raises ValueError if it, or an experiment in it or in this checkout, is missing."""
    try:
        commit = run_git("rev-parse", "--verify", "--quiet", "--short=10", "--end-of-options", f"{name}^{{commit}}")
    except subprocess.CalledProcessError:
        raise ValueError(f"--against {name!r}: no commit of this clone; give one of `git log`") from None
    there = run_git("ls-tree", "--name-only", commit, "experiments/").split()
    for experiment in experiments:
        file = f"experiments/{experiment}.py"
        if file not in there or not (ROOT / file).is_file():
            raise ValueError(f"--experiments has {experiment!r}: give names in experiments/, there at {commit} too")
    return commit


def make_identity(environment: Mapping[str, str], against: str, sizes: CellSizes) -> dict[str, Any]:
    """What two measurements must share to stand in one file: code, backend of `auto`, machine and sizes."""
    machine = {name: environment[name] for name in ("machine", "cpu", "python", "torch")}
    numbers = {name: getattr(sizes, name) for name in ("steps", "attention_rounds", "tokens")}
    return {"code": hash_code(), "backend": list_backends()[0], "against": against} | machine | numbers


def hash_code() -> str:
    """Hash of the files that decide a figure, committed or not, and of the compiled libraries.

    Unlike git's own description of the checkout it is the same after a result is written.
    """
    digest = hashlib.sha256()
    names = run_git("ls-files", "--cached", "--others", "--exclude-standard", "--", *CODE).splitlines()
    for path in [*(ROOT / name for name in names), *sorted(ROOT.glob(LIBRARIES))]:
        if path.is_file():  # a tracked file may be deleted
            digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:10]


def run_git(*words: str) -> str:
    """What git prints in this checkout."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def read_known(out: Path | None, identity: Mapping[str, Any], console: Callable[[str], None]) -> dict[str, Any]:
    """The measurements in a file by section and name; none, with a message, if its identity is another.

    With the environment in which they began: git would call this checkout modified once the file is written. Raises
    ValueError if the file is not a result of this benchmark.
    """
    if out is None or not out.exists():
        return {"measurements": {}}
    try:
        known = json.loads(out.read_text(encoding="utf-8"))
        theirs, continued = dict(known["identity"]), {name: known[name] for name in ("environment", "measurements")}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--out {str(out)!r}: is no result of this benchmark; name another file") from None
    if differing := [name for name, value in identity.items() if theirs.get(name) != value]:
        console(f"{out} is of other {', '.join(differing)} and will be replaced")
        return {"measurements": {}}
    return continued


def complete(
    result: dict[str, Any],
    plan: Mapping[str, Mapping[str, Callable[[], Any]]],
    out: Path | None,
    console: Callable[[str], None],
) -> None:
    """Add each measurement of the plan (by section and name) that the result lacks, and save after each."""
    for section, calls in plan.items():
        known = result["measurements"].setdefault(section, {})
        for name in [name for name in calls if name not in known]:
            console(f"{section}: {name}")
            known[name] = calls[name]()
            if out is not None:
                save(result, format_table(result), out)


def plan_attention(sizes: CellSizes) -> dict[str, dict[str, Callable[[], Any]]]:
    """The measurements of attention alone, by section and name."""
    tokens, rounds = sizes.tokens, sizes.attention_rounds
    return {
        "attention": {str(shape): partial(measure_attention, shape, tokens, rounds) for shape in sizes.shapes},
        "decoding": {f"B {b}, {keys} keys": partial(measure_decoding, b, keys, rounds) for b, keys in sizes.caches},
        "threads": {str(shape): partial(measure_threads, shape, tokens, rounds) for shape in sizes.threaded},
    }


def plan_cells(tree: Path, experiments: Sequence[str], sizes: CellSizes) -> dict[str, Callable[[], Any]]:
    """The pairs of cells by name. Every other pair begins with the other commit's cell."""
    return {
        f"{experiment}, {row}, pair {index + 1}": partial(
            measure_pair, {"new": ROOT, "old": tree}, experiment, row, index, sizes.steps
        )
        for index in range(max(sizes.pairs[experiment] for experiment in experiments))
        for experiment, row in product(experiments, ROWS)
        if index < sizes.pairs[experiment]
    }


@contextmanager
def check_out(commit: str) -> Iterator[Path]:
    """A worktree of a commit for the block, with its kernels compiled. Raises RuntimeError if that fails."""
    with tempfile.TemporaryDirectory(prefix="lit-lazy-bench-") as folder:
        tree = Path(folder).resolve() / "tree"
        run_git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            if (tree / "kernels" / "setup.py").exists():
                run_python(f"kernels of {commit}", tree / "kernels", "setup.py", "--quiet", "build_ext", "--inplace")
            yield tree
        finally:
            run_git("worktree", "remove", "--force", str(tree))


def measure_pair(trees: Mapping[str, Path], experiment: str, row: str, seed: int, steps: int | None) -> dict[str, Any]:
    """The `CellCost` of the same cell in each tree, one after the other."""
    names = [*trees][::-1] if seed % 2 else trees
    costs = {name: run_cell(trees[name], experiment, row, seed, steps) for name in names}
    return {"experiment": experiment, "row": row} | costs


def run_cell(tree: Path, experiment: str, row: str, seed: int, steps: int | None) -> dict[str, Any]:
    """A cell's `CellCost` on the code of a tree, on one CPU thread. Raises RuntimeError if it fails."""
    words = [str(tree), experiment, row, "--seed", str(seed), *([] if steps is None else ["--steps", str(steps)])]
    printed = run_python(f"{experiment}, {row} in {tree}", tree, "-P", one_cell.__file__, *words)
    return json.loads(printed.splitlines()[-1])


def run_python(what: str, folder: Path, *words: str) -> str:
    """What Python prints in a folder, on one CPU thread and with that tree's packages.

    Raises RuntimeError with its last message if it fails.
    """
    paths = os.pathsep.join((str(folder), str(folder / "kernels")))
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *words], env=os.environ | one_thread, cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise RuntimeError(f"{what}: {last}")
    return done.stdout


def summarise_cells(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians and quartiles over two or more pairs of one cell; a ratio above 1 means that the new commit is faster."""
    new, old = ([pair[name] for pair in pairs] for name in ("new", "old"))
    return {
        "backend": {"new": new[0]["backend"], "old": old[0]["backend"]},
        "seconds": _summarise([cost["seconds"] for cost in new]),
        "wall_seconds": _summarise([cost["wall_seconds"] for cost in new]),
        "cells_per_core_hour": {
            name: _summarise([3600 / cost["seconds"] for cost in costs]) for name, costs in (("new", new), ("old", old))
        },
        "ratio": compute_ratio([cost["seconds"] for cost in old], [cost["seconds"] for cost in new]),
        "step_seconds": _summarise([compute_step_seconds(cost) for cost in new]),
        "product_rate": _summarise([cost["product_rate"] for cost in new]),
        "share_of_product_rate": _summarise(
            [cost["flops_per_step"] / compute_step_seconds(cost) / cost["product_rate"] for cost in new]
        ),
        "phases": {
            name: {
                phase: statistics.median(cost["phases"][phase] / cost["seconds"] for cost in costs) for phase in PHASES
            }
            for name, costs in (("new", new), ("old", old))
        },
    }


def compare_outcomes(pairs: Sequence[Mapping[str, Any]], outcome: str) -> dict[str, float]:
    """Mean difference new - old of an outcome over the seeds, and its 95 % t interval."""
    differences = [pair["new"]["metrics"][outcome] - pair["old"]["metrics"][outcome] for pair in pairs]
    mean, spread = statistics.mean(differences), statistics.stdev(differences)
    half = float(student.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)) * spread / len(differences) ** 0.5
    return {"mean": mean, "spread": spread, "low": mean - half, "high": mean + half}


def compute_step_seconds(cost: Mapping[str, Any]) -> float:
    """CPU seconds of a step's forward pass, backward pass and optimiser."""
    return sum(cost["phases"][phase] for phase in ("forward", "backward", "optimiser")) / cost["steps"]


def _summarise(values: Sequence[float]) -> dict[str, float]:
    return asdict(Quartiles.of(values))


def format_table(result: Mapping[str, Any]) -> str:
    """The result as Markdown; a cell appears with its second pair."""
    measured = result["measurements"]
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for pair in measured.get("cells", {}).values():
        groups[pair["experiment"], pair["row"]].append(pair)
    cells = {" ".join(key): summarise_cells(pairs) for key, pairs in groups.items() if len(pairs) > 1}
    against = result["identity"]["against"]
    tables = [
        *(_format_cells(cells, against) if cells else ()),
        *_format_agreement(groups, against),
        *(_format_attention(measured["attention"], result["identity"]) if "attention" in measured else ()),
        *(_format_decoding(measured["decoding"]) if "decoding" in measured else ()),
        *(_format_threads(measured["threads"]) if "threads" in measured else ()),
        format_provenance(result),
    ]
    return "\n".join(tables) + "\n"


def _format_header(names: Sequence[str], labels: int) -> list[str]:
    """The first lines of a table whose first `labels` columns are text."""
    return [format_row(names), "|" + ":---|" * labels + "---:|" * (len(names) - labels)]


def _format_cells(cells: Mapping[str, Mapping[str, Any]], against: str) -> list[str]:
    lines = _format_header(
        ["cell", "backend", "CPU (s)", "wall (s)", "cells per core-hour", f"at {against}", "ratio", "step (ms)",
         "share of product rate", "product rate (GFLOP/s)"], 2
    )  # fmt: skip
    for name, cell in cells.items():
        rates = cell["cells_per_core_hour"]
        lines.append(
            format_row([
                name,
                cell["backend"]["new"],
                format_spread(cell["seconds"], digits=1),
                format_spread(cell["wall_seconds"], digits=1),
                *(format_spread(rates[commit], digits=0) for commit in ("new", "old")),
                format_spread(cell["ratio"]),
                f"{1000 * cell['step_seconds']['median']:.2f}",
                f"{cell['share_of_product_rate']['median']:.1%}",
                f"{cell['product_rate']['median'] / 1e9:.0f}",
            ])
        )  # fmt: skip
    lines += [
        "",
        f"Whole cells of this commit and {against}, run alternately on one thread: median [quartiles] of pairs. "
        f"Core-hours are CPU time. `ratio`: cells per core-hour, divided by those of {against}. A step: forward, "
        "backward, optimiser.",
        "",
        *_format_header(["cell", *PHASES[:4], "forward + backward", *PHASES[4:]], 1),
    ]
    for name, cell in cells.items():
        shares = cell["phases"]["new"]
        both = shares["forward"] + shares["backward"]
        values = [*(shares[x] for x in PHASES[:4]), both, *(shares[x] for x in PHASES[4:])]
        lines.append(format_row([name, *(f"{value:.1%}" for value in values)]))
    return [
        *lines,
        "",
        "Shares of a cell's CPU time: medians over pairs. `forward` includes calls that compute loss and gradients. "
        "`rest`: Lightning's loop, the loader, checkpoints, building the model.",
        "",
    ]


def _format_agreement(groups: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], against: str) -> list[str]:
    """Of the experiments with a declared margin and three or more pairs."""
    known = {key: pairs for key, pairs in groups.items() if key[0] in AGREEMENT and len(pairs) > 2}
    if not known:
        return []
    head = ["cell", "outcome", "seeds", f"mean at {against}", "difference", "95 % interval", "sd", "margin", "verdict"]
    lines = _format_header(head, 2)
    for (experiment, row), pairs in known.items():
        outcome, margin = AGREEMENT[experiment]
        found = compare_outcomes(pairs, outcome)
        old = statistics.mean(pair["old"]["metrics"][outcome] for pair in pairs)
        agrees = -margin < found["low"] and found["high"] < margin
        lines.append(
            format_row([
                f"{experiment} {row}", outcome, str(len(pairs)), f"{old:.5f}", f"{found['mean']:+.1e}",
                f"{found['low']:+.1e} to {found['high']:+.1e}", f"{found['spread']:.1e}", f"{margin:g}",
                "agree" if agrees else "not shown to agree",
            ])
        )  # fmt: skip
    return [
        *lines,
        "",
        f"Difference with the same seed: this commit's outcome minus {against}'s, in nats. Margins were declared "
        "before the runs.",
        "",
    ]


def _format_attention(shapes: Mapping[str, Mapping[str, Any]], identity: Mapping[str, Any]) -> list[str]:
    lines = _format_header(
        ["heads x dimension", "backend", "SDPA (ms)", *(f"{state} / SDPA" for state in STATES), "empty tiles, local"], 2
    )
    for name, shape in shapes.items():
        lines.append(format_row([*_format_ratios(name, shape, 1000), f"{shape['empty_tiles']['local']:.1%}"]))
    return [
        *lines,
        "",
        f"CPU time of the forward and backward passes for {identity['tokens']} tokens in float32 on one thread: median "
        "[quartiles] of paired rounds. States: softmax (tau 0, no bias), untrained (tau 1, bias 0), local (tau 1, bias "
        f"-distance / 8). Tiles: {TILE_ROWS} x {TILE_COLUMNS}. The JSON file has all backends.",
        "",
    ]


def _format_threads(shapes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    paths = list(next(iter(shapes.values()))["ratio"])
    lines = _format_header(["heads x dimension", *paths], 1)
    lines += [
        format_row([name, *(format_spread(shape["ratio"][path]) for path in paths)]) for name, shape in shapes.items()
    ]
    return [
        *lines,
        "",
        "Wall time on one thread divided by wall time on two. Shapes and states: see two tables above.",
        "",
    ]


def _format_decoding(caches: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = _format_header(["cache", "backend", "SDPA (us)", *(f"{state} / SDPA" for state in STATES)], 2)
    for name, cache in caches.items():
        lines.append(format_row(_format_ratios(name, cache, 1e6)))
    return [
        *lines,
        "",
        f"CPU time on one thread for B cached sequences, one query each, with {DECODE_HEADS} heads of dimension "
        f"{DECODE_HEAD_DIM}.",
        "",
    ]


def _format_ratios(name: str, measured: Mapping[str, Any], factor: float) -> list[str]:
    """Name, the backend that `auto` takes, SDPA's time and the ratio of each state."""
    ratio = measured["ratio"]
    backend = next(iter(ratio)).split()[0]
    sdpa = f"{factor * statistics.median(measured['seconds'][SDPA]):.2f}"
    return [name, backend, sdpa, *(format_spread(ratio[f"{backend} {state}"]) for state in STATES)]
