"""Speed and memory of flash_lazy and its peers on a GPU; on a CPU, a cost model and compilation report of the kernels.

    python3 -m bench --quick --out FOLDER
    python3 -m bench --minutes 9 --out FOLDER      repeat this command to resume

On a CUDA device the kernels' results are checked first; a wrong one blocks the workloads that depend on it. Then
forward, forward + backward and decoding are timed, the most informative workloads first: all peers alternate in one
process, timed by CUDA events; median and quartiles over the rounds, compared with the limits of the device. The data
are random, with a recency that sets the share of 64 x 64 tiles in which no weight survives. That share is measured, and
block sizes are tuned for each.

FOLDER receives bench.json and bench.md, replaced atomically after every step, plots at the end (if matplotlib is
installed), and bench.log, the output of the kernels' compiler. A crash or hang costs only one peer at one workload, or
one workload, and is recorded with its reason. A killed command loses only the current workload: the next one measures
what is missing, then what was lost. Results in FOLDER from other code or another machine are not overwritten.

Without a CUDA device (or with CUDA_VISIBLE_DEVICES= ) the command prints the cost model and a table of the compiled
kernels; neither is a measurement of speed. Needs torch and triton.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from bench import compile_report
from bench.benchmark import Benchmark
from bench.provenance import collect_provenance
from bench.results import RefusedError
from bench.workloads import FULL, QUICK, plan_seconds
from flash_lazy.fused import configurations

WIDTHS, QUICK_MINUTES, BACKEND = (64, 128), 8.0, "triton"


def _publish(out: Path | None, name: str, result: Mapping[str, Any], text: str) -> None:
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        (out / f"{name}.md").write_text(text, encoding="utf-8")


def run_on_paper(options: argparse.Namespace) -> int:
    """Print the cost model and the table of compiled kernels; returns the exit status."""
    if configurations.INTERPRETED:
        print("TRITON_INTERPRET=1: triton compiles nothing in its interpreter; unset it", file=sys.stderr)
        return 2
    made = collect_provenance("bench")
    rows = compile_report.report(options.widths or WIDTHS, options.all_configurations)
    text = "\n".join([
        "# Kernels without a GPU",
        "",
        "Nothing here is a measurement of speed: counts of the kernels as written, and what they compile to.",
        "",
        ", ".join(f"{name} {value}" for name, value in made.items()) + ".",
        "",
        compile_report.format_cost_model(),
        "## Compiled",
        "",
        compile_report.format_table(rows),
        compile_report.format_schedule(rows),
    ])  # fmt: skip
    _publish(options.out, "compiled", {"made": made, "rows": rows}, text)
    return 0


def run_on_gpu(options: argparse.Namespace) -> int:
    """Check the results, then measure; returns the exit status."""
    if options.out is None:
        print("--out is missing: give the folder for the results", file=sys.stderr)
        return 2
    workloads = QUICK if options.quick else FULL
    minutes = options.minutes or (QUICK_MINUTES if options.quick else None)
    benchmark = Benchmark(options.out, workloads, BACKEND, options.authors, minutes, options.time_anyway)
    try:
        return benchmark.run(options.fresh)
    except RefusedError as refused:
        print(refused, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; results are in {options.out}; repeat the command to resume", file=sys.stderr)
        return 130


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _parse_widths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and 16 <= int(part) <= 256 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers from 16 to 256, separated by commas")
    return tuple(int(part) for part in parts)


def _parse_minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: give minutes above 0")
    return minutes


def _parse_checkout(text: str) -> Path:
    if not (Path(text) / "lazy_attention_triton.py").is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r}: has no lazy_attention_triton.py; give a checkout of the authors' repository"
        )
    return Path(text)


def _parse_folder(text: str) -> Path:
    existing = next(path for path in (Path(text), *Path(text).absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{str(existing)!r}: is not a writable folder; give an existing or a new folder"
        )
    return Path(text)


def make_parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="python3 -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = "folder for tables, figures (JSON) and plots; required on a GPU, optional elsewhere"
    parser.add_argument("--out", type=_parse_folder, metavar="FOLDER", help=text)
    text = (
        f"{len(QUICK)} of the {len(FULL)} workloads: L 4096 at D 128 and 64, GQA, L 16384, decoding; estimated "
        f"{plan_seconds(QUICK) / 60:.0f} minutes instead of {plan_seconds(FULL) / 60:.0f}, and at most "
        f"{QUICK_MINUTES:.0f} (or --minutes)"
    )
    parser.add_argument("--quick", action="store_true", help=text)
    text = "start no measurement after M minutes, and stop the current one soon after"
    parser.add_argument("--minutes", type=_parse_minutes, metavar="M", help=text)
    text = "also time workloads with wrong results, and mark them in tables and plots"
    parser.add_argument("--time-anyway", action="store_true", help=text)
    parser.add_argument("--fresh", action="store_true", help="start again and replace the results in FOLDER")
    text = "checkout of github.com/Fzkuji/flash-lazy-attention to measure as well"
    parser.add_argument("--authors", type=_parse_checkout, metavar="PATH", help=text)
    text = "without a GPU: head widths D to compile for (default: 64,128)"
    parser.add_argument("--widths", type=_parse_widths, metavar="D,..", help=text)
    text = "without a GPU: compile every configuration, not only the defaults"
    parser.add_argument("--all-configurations", action="store_true", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0 done, 1 wrong results or GPU unusable, 2 wrong input, 130 interrupted."""
    options = make_parser().parse_args(argv)
    gpu = torch.cuda.is_available()
    unused = ("widths", "all_configurations") if gpu else ("quick", "minutes", "time_anyway", "fresh", "authors")
    ignored = [f"--{name.replace('_', '-')}" for name in unused if getattr(options, name)]
    if ignored:
        why = "only used without a GPU (CUDA_VISIBLE_DEVICES= )" if gpu else "only used with a GPU"
        print(f"{', '.join(ignored)} ignored: {why}", file=sys.stderr)
    return run_on_gpu(options) if gpu else run_on_paper(options)


if __name__ == "__main__":
    sys.exit(main())
