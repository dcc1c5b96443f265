"""Speed and memory of flash_lazy beside its peers on a GPU; on a CPU, what the kernels cost on paper and compile to.

    python3 -m bench --quick --out FOLDER
    python3 -m bench --minutes 9 --out FOLDER      the same line again goes on where this one ended

On a CUDA device the kernels' results are checked first; a wrong one blocks the points that it stands for. Then
forward, forward + backward and decoding are timed, the most telling points first: all peers in one process, taking
turns, by CUDA events; median and quartiles over the rounds, beside what the device can do. The data is random, with a
recency that sets the share of 64 x 64 tiles in which no weight survives; that share is measured, and block sizes are
tuned for each.

FOLDER holds bench.json and bench.md, replaced whole after every step, at the end plots (they need matplotlib), and
bench.log, what the kernels' compiler prints. What crashes or hangs costs a peer at a point, or a point, and is recorded
with its reason. A command that is killed loses the point that it was at: run again, it measures what is missing, then
what was lost. Results of other code or of another machine in FOLDER are refused.

Without a CUDA device (also with CUDA_VISIBLE_DEVICES= ) the cost model and a table of what the kernels compile to are
printed; neither is a measurement of speed. Needs torch and triton.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from bench import compiled
from bench.course import Course
from bench.points import FULL, QUICK, plan_seconds
from bench.provenance import collect_provenance
from bench.results import RefusedError
from flash_lazy.fused import configurations

WIDTHS, QUICK_MINUTES, BACKEND = (64, 128), 8.0, "triton"


def _publish(out: Path | None, name: str, result: Mapping[str, Any], text: str) -> None:
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / f"{name}.md").write_text(text)


def run_on_paper(options: argparse.Namespace) -> int:
    """Cost model and compile-only table; the exit status."""
    if configurations.INTERPRETED:
        print("TRITON_INTERPRET=1: nothing is compiled where triton interprets; unset it", file=sys.stderr)
        return 2
    made = collect_provenance("bench")
    rows = compiled.report(options.widths or WIDTHS, options.all_configurations)
    text = "\n".join([
        "# Kernels without a GPU",
        "",
        "Nothing here is a measurement of speed: counts of the kernels as written, and what they compile to.",
        "",
        ", ".join(f"{name} {value}" for name, value in made.items()) + ".",
        "",
        compiled.format_cost_model(),
        "## Compiled",
        "",
        compiled.format_table(rows),
        compiled.format_schedule(rows),
    ])  # fmt: skip
    _publish(options.out, "compiled", {"made": made, "rows": rows}, text)
    return 0


def run_on_gpu(options: argparse.Namespace) -> int:
    """Gate and measurements; the exit status."""
    if options.out is None:
        print("--out is missing: give the folder where results are written after every point", file=sys.stderr)
        return 2
    points = QUICK if options.quick else FULL
    minutes = options.minutes or (QUICK_MINUTES if options.quick else None)
    course = Course(options.out, points, BACKEND, options.authors, minutes, options.time_anyway)
    try:
        return course.run(options.fresh)
    except RefusedError as refused:
        print(refused, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {options.out}, and the same command goes on", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _make_numbers_parser(name: str, wanted: str, fits: Callable[[int], bool]) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        parts = text.split(",")
        if not all(part.isdecimal() and fits(int(part)) for part in parts):
            raise argparse.ArgumentTypeError(f"{name} has {text!r}; give {wanted}")
        return tuple(int(part) for part in parts)

    return parse


def _parse_minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not minutes > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give minutes above 0")
    return minutes


def _parse_checkout(text: str) -> Path:
    if not (Path(text) / "lazy_attention_triton.py").is_file():
        raise argparse.ArgumentTypeError(
            f"no lazy_attention_triton.py in {text!r}; give a checkout of their repository"
        )
    return Path(text)


def _parse_folder(text: str) -> Path:
    existing = next(path for path in (Path(text), *Path(text).absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{str(existing)!r} is no folder that can be written; give a folder, which may be new"
        )
    return Path(text)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python3 -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = "folder for tables, figures (JSON) and plots; needed on a GPU, elsewhere they may just be printed"
    parser.add_argument("--out", type=_parse_folder, metavar="FOLDER", help=text)
    text = (
        f"{len(QUICK)} of the {len(FULL)} points: L 4096 at D 128 and 64, GQA, L 16384, decoding; about "
        f"{plan_seconds(QUICK) / 60:.0f} minutes by plan instead of {plan_seconds(FULL) / 60:.0f}, and at most "
        f"{QUICK_MINUTES:.0f} (or --minutes)"
    )
    parser.add_argument("--quick", action="store_true", help=text)
    text = "starts no new measurement after M minutes, and ends the one under way soon after"
    parser.add_argument("--minutes", type=_parse_minutes, metavar="M", help=text)
    text = "times also what the gate found wrong, and marks it in tables and plots"
    parser.add_argument("--time-anyway", action="store_true", help=text)
    parser.add_argument("--fresh", action="store_true", help="begins again: what FOLDER holds is replaced")
    text = "checkout of github.com/Fzkuji/flash-lazy-attention, to be measured too"
    parser.add_argument("--authors", type=_parse_checkout, metavar="PATH", help=text)
    text = "without a GPU: widths D of a head to compile for (default: 64,128)"
    widths = _make_numbers_parser("it", "whole numbers from 16 to 256, with commas between", lambda x: 16 <= x <= 256)
    parser.add_argument("--widths", type=widths, metavar="D,..", help=text)
    text = "without a GPU: compiles every configuration, not only the default ones"
    parser.add_argument("--all-configurations", action="store_true", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status: 0 done, 1 wrong results or no use of the GPU, 2 wrong input, 130 interrupted."""
    options = make_parser().parse_args(argv)
    gpu = torch.cuda.is_available()
    idle = ("widths", "all_configurations") if gpu else ("quick", "minutes", "time_anyway", "fresh", "authors")
    given = [f"--{name.replace('_', '-')}" for name in idle if getattr(options, name)]
    if given:
        why = (
            "something is compiled only without a GPU (CUDA_VISIBLE_DEVICES= )"
            if gpu
            else "nothing is timed without a GPU"
        )
        print(f"{', '.join(given)} ignored: {why}", file=sys.stderr)
    return run_on_gpu(options) if gpu else run_on_paper(options)


if __name__ == "__main__":
    sys.exit(main())
