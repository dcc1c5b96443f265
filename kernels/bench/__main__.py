"""Speed and memory of flash_lazy beside its peers on a GPU; on a CPU, what the kernels cost on paper and compile to.

On a CUDA device the kernels' results are checked first, and nothing is timed where a check fails (exit status 1). Then
forward, forward + backward and decoding are timed: all peers in one process, taking turns, by CUDA events; median and
quartiles over the rounds. The data is random, with a recency that sets the share of 64 x 64 tiles in which no weight
survives; that share is measured. A peer that could not be had reads "not run", with the reason.

Without a CUDA device (also with CUDA_VISIBLE_DEVICES= ) the cost model and a table of what the kernels compile to are
printed; neither is a measurement of speed. Needs torch and triton; the plots need matplotlib.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

import torch

from bench import compiled
from bench.peers import GATE, gate, peers
from bench.provenance import made_with
from bench.results import plots, tables
from bench.timing import HEADS, ROUNDS, TOKENS, measure_all, measure_ceiling
from flash_lazy.fused import configurations

LENGTHS, QUICK_LENGTHS, WIDTHS = (1024, 2048, 4096, 8192, 16384, 32768), (4096,), (64, 128)
QUICK_MINUTES, MOST_WORKERS = 8.0, 8


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
    if configurations.INTERPRETED:
        print("TRITON_INTERPRET=1: nothing is compiled where triton interprets; unset it", file=sys.stderr)
        return 2
    made = made_with("bench")
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
        "made": made_with("bench"),
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
    """Reports a mistake in one line."""

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
    text = "folder for tables, figures (JSON) and plots; without it they are only printed"
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
        print(f"{', '.join(idle)} ignored: nothing is timed without a GPU", file=sys.stderr)
    options.lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    if options.quick and options.minutes is None:
        options.minutes = QUICK_MINUTES
    return on_gpu(options) if torch.cuda.is_available() else on_paper(options)


if __name__ == "__main__":
    sys.exit(main())
